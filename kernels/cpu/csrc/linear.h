// Linear layers: y = x W^T + b, or gated: y = gate(x G^T) x (x U^T).
//
// Every output is one chain: an accumulator that starts at 0 and takes the products of ascending input dims in order,
// plus the bias, rounded once. Which rows share a loaded piece of the weight and which thread computes what is decided
// below and changes nothing about that chain: a row's bits depend on the row and the weight only.
//
// Packed weight: [blocks of 32 columns][depth][32 columns] units of 32 bits (formats.h: one fp32 or a pair of bf16
// input dims), so that few rows stream it from memory in one direction. A column is an output; in a gated layer a block
// has 16 columns of G and the same 16 of U. Columns and input dims beyond the last are zeros.
//
// A weight in codes (linear_codes.h) becomes units on its way to the registers.

#pragma once

#include <cstdlib>

#include "formats.h"
#include "numbers.h"
#include "parallel.h"

// A packed weight. Mirrored in kernels/cpu/linear.py.
struct LinearWeight {
    const uint32_t *units;  // [blocks, depth, 32], 64-byte aligned; null: codes
    const uint8_t *codes;   // 64-byte aligned; null: units
    const float *scales;    // [blocks * 32] of codes without groups, else null
    const float *bias;      // [blocks * 32] or null
    int64_t n, k;           // outputs, inputs
    int64_t depth;          // units of a column, at least ceil(k / numbers in a unit); a multiple of 16 for bf16
    int64_t gate;           // a Gate
    int64_t group;          // dims that share a scale among the codes; 0: there are no groups
    int64_t bits;           // of a code, 4 or 8
    int64_t lowest;         // what a code of 4 bits begins at
    int64_t scale_bytes;    // of a group's scale, and minimum: 2 fp16, 4 fp32
    int64_t minimums;       // 1: groups have them
    int64_t paired;         // 1: codes are in pairs

    bool gated() const { return gate != 0; }
};

// y = x W^T + b of `rows` rows of x, `x_stride` numbers apart; y is dense. Entries return 1 where there is no memory.
// Mirrored in kernels/cpu/linear.py.
struct LinearCall {
    const LinearWeight *weight;
    const void *x;
    int64_t x_stride, rows;
    void *y;
    int64_t wide;  // y is fp32, and nothing is rounded; of no gated weight
};

// Where rows of outputs go, from the first one at hand.
struct Outputs {
    char *first = nullptr;
    int64_t row_bytes = 0;
    bool wide = false;

    Outputs() = default;
    Outputs(const LinearCall &call, int64_t number_bytes)
        : first(static_cast<char *>(call.y)),
          row_bytes(call.weight->n * (call.wide ? 4 : number_bytes)),
          wide(call.wide) {}
    Outputs from(int64_t row) const {
        Outputs rest = *this;
        rest.first += row * row_bytes;
        return rest;
    }
};

namespace {

constexpr int BLOCK = 32, HALF = BLOCK / 2;  // columns of a block of the weight
constexpr int64_t SMALL_SHARE = 1 << 15;     // units of weight x panels of rows: less is not worth waking a thread

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

inline int64_t outputs_of_block(const LinearWeight &w) { return w.gated() ? HALF : BLOCK; }
inline int64_t blocks_of(const LinearWeight &w) { return divide_up(w.n, outputs_of_block(w)); }

// Sums of W columns from `column` on -> what is gated, or rounded and written.
inline Vec finished(const LinearWeight &w, Vec sum, int64_t column) {
    if (w.scales) sum = mul(sum, load(w.scales + column));
    return w.bias ? add(sum, load(w.bias + column)) : sum;
}

// Memory that a thread keeps from call to call.
struct ThreadMemory {
    void *memory = nullptr;
    int64_t size = 0;

    ~ThreadMemory() { free(memory); }
    // `bytes` of memory, 64-byte aligned, contents undefined; null if there is none.
    char *reserve(int64_t bytes) {
        if (bytes > size) {
            free(memory);
            size = divide_up(bytes, 4096) * 4096;
            memory = aligned_alloc(4096, size);
            if (!memory) size = 0;
        }
        return static_cast<char *>(memory);
    }
};

// The rows and blocks that a thread computes.
struct Share {
    int64_t first_row, end_row, first_block, end_block;
};

// Splits rows (in multiples of `step`) x blocks into a grid of `threads` parts. A block costs its reading once and its
// rows' work; a row costs its packing too: all in units of the work of `step` rows and one block.
inline Share share_of(int thread, int threads, int64_t rows, int64_t blocks, int64_t step) {
    constexpr int64_t READ = 3, PACK = 4;
    const int64_t steps = divide_up(rows, step);
    int row_parts = 1;
    int64_t least = INT64_MAX;
    for (int parts = 1; parts <= threads; parts++) {
        if (threads % parts) continue;
        const int64_t own_steps = divide_up(steps, parts), own_blocks = divide_up(blocks, threads / parts);
        const int64_t cost = own_blocks * (own_steps + READ) + own_steps * PACK;
        if (cost < least) least = cost, row_parts = parts;
    }
    const int block_parts = threads / row_parts, row_part = thread / block_parts, block_part = thread % block_parts;
    return {steps * row_part / row_parts * step, smaller(rows, steps * (row_part + 1) / row_parts * step),
            blocks * block_part / block_parts, blocks * (block_part + 1) / block_parts};
}

// As many threads as have enough to do.
inline int useful_threads(const LinearWeight &w, int64_t rows) {
    const int64_t work = blocks_of(w) * BLOCK * w.depth * divide_up(rows, 16);
    return static_cast<int>(smaller(octavo_threads(), 1 + work / SMALL_SHARE));
}

}  // namespace
