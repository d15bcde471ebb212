// Linear layers in vector registers, for any format and instruction set: M rows x N vectors of outputs are summed up in
// registers while the input dims pass by.

#pragma once

#include "linear_codes.h"

namespace {

// Rows that are computed together, and accumulators that fit the registers beside what they take in.
#if defined(__AVX512F__)
constexpr int MOST_ROWS = 12, ACCUMULATORS = 24;
#elif defined(__AVX2__)
constexpr int MOST_ROWS = 6, ACCUMULATORS = 12;
#else
constexpr int MOST_ROWS = 4, ACCUMULATORS = 8;
#endif
constexpr int BLOCK_VECS = BLOCK / W;
constexpr int64_t SUPER_ROWS = 240;  // packed together; a multiple of all MOST_ROWS

// M rows of x. Packed: [units, M] units. In place: rows `stride` numbers apart.
template <class F, int M, bool PACKED>
struct Panel {
    const typename F::Number *x;
    int64_t stride;

    Units unit(int m, int64_t u) const {
        uint32_t unit;
        memcpy(&unit, PACKED ? x + (u * M + m) * F::PAIR : x + m * stride + u * F::PAIR, 4);
        return splat_unit(unit);
    }
};

// Hands out a block of the weight in units, one of N x W columns after the other. See CodeStream for weights in codes.
template <int N>
class UnitStream {
    const uint32_t *next_units;

  public:
    UnitStream(const uint32_t *block, int64_t column) : next_units(block + column) {}

    void next(Units (&to)[N]) {
        for (int j = 0; j < N; j++) to[j] = load_units(next_units + j * W);
        for (int j = 0; j < N * W; j += 16) __builtin_prefetch(next_units + 32 * BLOCK + j);
        next_units += BLOCK;
    }
};

// A block of the weight.
struct UnitBlock {
    const uint32_t *units;

    template <int N>
    UnitStream<N> stream(int64_t column) const { return {units, column}; }
};

template <class F, Codes CODES>
struct CodeBlock {
    const LinearWeight &w;
    const uint8_t *codes;

    template <int N>
    CodeStream<F, CODES, N> stream(int64_t column) const { return {w, codes, column}; }
};

template <class F, Codes CODES>
void widen_block(CodeBlock<F, CODES> from, int64_t depth, uint32_t *to) {
    auto stream = from.template stream<BLOCK_VECS>(0);
    for (int64_t u = 0; u < depth; u++, to += BLOCK) {
        Units units[BLOCK_VECS];
        stream.next(units);
        for (int j = 0; j < BLOCK_VECS; j++) store_units(to + j * W, units[j]);
    }
}

// The sums of a row and block -> its outputs.
template <class Numbers, Gate GATE>
void write_gated(const LinearWeight &w, const float *sums, int64_t block, char *row) {
    constexpr int64_t MOST = GATE == Gate::NONE ? BLOCK : HALF;
    alignas(64) typename Numbers::Number numbers[MOST];
    for (int64_t i = 0; i < MOST; i += W) {
        Vec v = load(sums + i);
        if constexpr (GATE != Gate::NONE)
            v = gated<Numbers, GATE>(Numbers::rounded(v), Numbers::rounded(load(sums + HALF + i)));
        Numbers::store_numbers(numbers + i, v);
    }
    constexpr int64_t SIZE = sizeof(typename Numbers::Number);
    memcpy(row + block * MOST * SIZE, numbers, smaller(MOST, w.n - block * MOST) * SIZE);
}

template <class Numbers>
void write_outputs(const LinearWeight &w, const float *sums, int64_t block, const Outputs &y) {
    if (y.wide) return write_gated<Fp32Numbers, Gate::NONE>(w, sums, block, y.first);
    switch (static_cast<Gate>(w.gate)) {
        case Gate::NONE: return write_gated<Numbers, Gate::NONE>(w, sums, block, y.first);
        case Gate::SILU: return write_gated<Numbers, Gate::SILU>(w, sums, block, y.first);
        case Gate::GELU_TANH: return write_gated<Numbers, Gate::GELU_TANH>(w, sums, block, y.first);
    }
}

// M rows x one block.
template <class F, class Numbers, int M, bool PACKED, class Block>
void multiply_block(const LinearWeight &w, Block weight, Panel<F, M, PACKED> panel, int64_t block,
                    const Outputs &y) {
    constexpr int N = ACCUMULATORS / M >= BLOCK_VECS ? BLOCK_VECS : 2;
    const int64_t depth = divide_up(w.k, F::PAIR);
    alignas(64) float sums[M][BLOCK];
    for (int first = 0; first < BLOCK_VECS; first += N) {
        Vec sum[M][N];
        for (auto &row : sum)
            for (Vec &s : row) s = splat(0);
        auto stream = weight.template stream<N>(first * W);
        for (int64_t u = 0; u < depth; u++) {
            Units piece[N];
            stream.next(piece);
            for (int m = 0; m < M; m++) {
                const Units unit = panel.unit(m, u);
                for (int j = 0; j < N; j++) sum[m][j] = F::dot(sum[m][j], unit, piece[j]);
            }
        }
        for (int j = 0; j < N; j++) {
            const int64_t column = (first + j) * W;
            for (int m = 0; m < M; m++) store(sums[m] + column, finished(w, sum[m][j], block * BLOCK + column));
        }
    }
    for (int m = 0; m < M; m++) write_outputs<Numbers>(w, sums[m], block, y.from(m));
}

// As multiply_block, for a number of rows known at run time.
template <class F, class Numbers, bool PACKED, int M = MOST_ROWS, class Block>
void multiply_rows(const LinearWeight &w, Block weight, const typename F::Number *x, int64_t stride, int rows,
                   int64_t block, const Outputs &y) {
    if constexpr (M > 1) {
        if (rows < M) return multiply_rows<F, Numbers, PACKED, M - 1>(w, weight, x, stride, rows, block, y);
    }
    multiply_block<F, Numbers>(w, weight, Panel<F, M, PACKED>{x, stride}, block, y);
}

// rows of x -> [units, rows] units; the last number of an odd row gets a zero beside it.
template <class F>
void pack_panel(const typename F::Number *x, int64_t stride, int rows, int64_t k, typename F::Number *to) {
    for (int m = 0; m < rows; m++, x += stride) {
        const auto place = [=](int64_t u) { return to + (u * rows + m) * F::PAIR; };
        const int64_t whole = k / F::PAIR;
        for (int64_t u = 0; u < whole; u++) memcpy(place(u), x + u * F::PAIR, 4);
        if (k % F::PAIR) place(whole)[0] = x[k - 1], place(whole)[1] = 0;
    }
}

// One thread's rows and blocks. False: no memory.
template <class F, class Numbers, class Number = typename F::Number>
bool multiply_share(const LinearWeight &w, const Number *x, int64_t x_stride, const Outputs &y, Share share) {
    static thread_local ThreadMemory memory;
    const int64_t width = divide_up(w.k, F::PAIR) * F::PAIR, all = share.end_row - share.first_row;
    if (all <= 0 || share.first_block == share.end_block) return true;
    // Rows a multiple of 4096 bytes apart would fight for the same places of the cache.
    const bool in_place = all <= MOST_ROWS && width == w.k && (all == 1 || x_stride * sizeof(Number) % 4096 != 0);
    const bool widen = w.codes && all > MOST_ROWS;  // once for all panels
    const int64_t block_units = w.depth * BLOCK, widened_bytes = widen ? block_units * 4 : 0;
    const int64_t packed_bytes = in_place ? 0 : smaller(all, SUPER_ROWS) * width * sizeof(Number);
    char *room = in_place ? nullptr : memory.reserve(widened_bytes + packed_bytes);
    if (!in_place && !room) return false;
    auto *units = reinterpret_cast<uint32_t *>(room);
    auto *packed = reinterpret_cast<Number *>(room + widened_bytes);
    for (int64_t row = share.first_row; row < share.end_row; row += SUPER_ROWS) {
        const int64_t rows = smaller(SUPER_ROWS, share.end_row - row);
        const int64_t panel = divide_up(rows, divide_up(rows, MOST_ROWS));
        const auto rows_of = [=](int64_t first) { return static_cast<int>(smaller(panel, rows - first)); };
        for (int64_t r = 0; r < rows && !in_place; r += panel)
            pack_panel<F>(x + (row + r) * x_stride, x_stride, rows_of(r), w.k, packed + r * width);
        for (int64_t block = share.first_block; block < share.end_block; block++) {
            const auto multiply = [&](auto weight) {
                for (int64_t r = 0; r < rows; r += panel) {
                    const Outputs to = y.from(row + r);
                    const Number *own = in_place ? x + row * x_stride : packed + r * width;
                    if (in_place) multiply_rows<F, Numbers, false>(w, weight, own, x_stride, rows_of(r), block, to);
                    else multiply_rows<F, Numbers, true>(w, weight, own, 0, rows_of(r), block, to);
                }
            };
            if (!w.codes) {
                multiply(UnitBlock{w.units + block * block_units});
                continue;
            }
            with_codes(w, [&](auto codes) {
                const CodeBlock<F, codes()> from{w, w.codes + block * code_bytes<F>(w)};
                if (!widen) multiply(from);
                else widen_block(from, w.depth, units), multiply(UnitBlock{units});
            });
        }
    }
    return true;
}

template <class F, class Numbers, class Number = typename F::Number>
int32_t linear(const LinearCall &call) {
    const LinearWeight &w = *call.weight;
    const int threads = useful_threads(w, call.rows);
    bool failed = false;
    auto body = [&](int thread) {
        const Share share = share_of(thread, threads, call.rows, blocks_of(w), MOST_ROWS);
        const auto *x = static_cast<const Number *>(call.x);
        if (!multiply_share<F, Numbers>(w, x, call.x_stride, Outputs(call, sizeof(Number)), share)) failed = true;
    };
    on_threads(threads, body);
    return failed;
}

}  // namespace

#define LINEAR_ENTRY(name, F, Numbers) \
    extern "C" int32_t name(const LinearCall *call) { return linear<F, Numbers>(*call); }
