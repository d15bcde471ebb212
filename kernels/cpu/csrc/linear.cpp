// Lays weights of linear layers out for multiplication (linear.h says how).

#include "linear_codes.h"

// weight: n rows of k numbers of `itemsize` bytes (4, or 2: in pairs), `row_bytes` apart, one a column.
// units: [ceil(n / 32), depth, 32].
extern "C" void octavo_pack_linear(const uint8_t *weight, int64_t row_bytes, int64_t itemsize, int64_t n, int64_t k,
                                   int64_t depth, uint32_t *units) {
    const int64_t threads = octavo_threads();
    const int64_t blocks = divide_up(n, BLOCK), pair = 4 / itemsize, whole = k / pair, rest = k % pair * itemsize;
    auto body = [&](int thread) {
        for (int64_t block = blocks * thread / threads; block < blocks * (thread + 1) / threads; block++) {
            uint32_t *to = units + block * depth * BLOCK;
            memset(to, 0, depth * BLOCK * 4);
            for (int64_t start = 0; start <= whole; start += 16)  // a line of each row
                for (int64_t i = 0; i < smaller(BLOCK, n - block * BLOCK); i++) {
                    const uint8_t *row = weight + (block * BLOCK + i) * row_bytes;
                    const int64_t end = smaller(start + 16, whole);
                    for (int64_t u = start; u < end; u++) memcpy(to + u * BLOCK + i, row + u * 4, 4);
                    if (rest && end == whole) memcpy(to + whole * BLOCK + i, row + whole * 4, rest);
                }
        }
    };
    on_threads(static_cast<int>(threads), body);
}

// codes: n rows of k, `row_bytes` apart, one a column. to: [ceil(n / 32), dims, 32].
extern "C" void octavo_pack_linear_int8(const uint8_t *codes, int64_t row_bytes, int64_t n, int64_t k, int64_t dims,
                                        uint8_t *to) {
    const int64_t threads = octavo_threads();
    const int64_t blocks = divide_up(n, BLOCK);
    auto body = [&](int thread) {
        for (int64_t block = blocks * thread / threads; block < blocks * (thread + 1) / threads; block++) {
            uint8_t *own = to + block * dims * BLOCK;
            memset(own, 0, dims * BLOCK);
            for (int64_t start = 0; start < k; start += 64)  // a line of each row
                for (int64_t i = 0; i < smaller(BLOCK, n - block * BLOCK); i++) {
                    const uint8_t *row = codes + (block * BLOCK + i) * row_bytes;
                    for (int64_t dim = start; dim < smaller(start + 64, k); dim++) own[dim * BLOCK + i] = row[dim];
                }
        }
    };
    on_threads(static_cast<int>(threads), body);
}

// codes: n rows of k, `row_bytes` apart, one a column; scales, minimums: n rows of k / group, dense; to: [ceil(n / 32),
// groups] as `w` says, which needs no more than k and what is said of groups.
extern "C" void octavo_pack_linear_groups(const LinearWeight *w, const uint8_t *codes, int64_t row_bytes,
                                          const uint8_t *scales, const uint8_t *minimums, int64_t n, uint8_t *to) {
    const int64_t threads = octavo_threads();
    const int64_t blocks = divide_up(n, BLOCK), groups = w->k / w->group, size = w->scale_bytes;
    auto body = [&](int thread) {
        for (int64_t block = blocks * thread / threads; block < blocks * (thread + 1) / threads; block++) {
            uint8_t *own = to + block * groups * group_bytes(*w);
            memset(own, 0, groups * group_bytes(*w));
            for (int64_t g = 0; g < groups; g++, own += group_bytes(*w))
                for (int64_t i = 0; i < smaller(BLOCK, n - block * BLOCK); i++) {
                    const int64_t column = block * BLOCK + i;
                    const uint8_t *from = codes + column * row_bytes + g * w->group;
                    uint8_t *lanes = own + head_bytes(*w) + i / HALF * HALF;
                    memcpy(own + i * size, scales + (column * groups + g) * size, size);
                    if (w->minimums)
                        memcpy(own + (BLOCK + i) * size, minimums + (column * groups + g) * size, size);
                    for (int64_t dim = 0; dim < w->group; dim++) {
                        // Of the two vectors for a pair of dims and 16 columns.
                        const int64_t vector = w->paired ? i % HALF / 8 : dim % 2;
                        const int64_t lane = w->paired ? i % 8 * 2 + dim % 2 : i % HALF;
                        if (w->bits == 8) lanes[(dim / 2 * 2 + vector) * BLOCK + lane] = from[dim];
                        else lanes[dim / 2 * BLOCK + lane] |= (from[dim] - w->lowest) << vector * 4;
                    }
                }
        }
    };
    on_threads(static_cast<int>(threads), body);
}
