// Norms, rotary embedding, gates and rows of tables, row by row: fp32 inside, one fixed order of additions, so that a
// row's bits depend on the row only. Contracts: kernels/ops.py. Structs are mirrored in kernels/cpu/elementwise.py; all
// strides are in numbers.

#pragma once

#include "numbers.h"
#include "parallel.h"

// x, out: [rows, heads, width], dense inside a row, and may be the same; residual the same with one head, or null.
struct NormCall {
    const void *x;
    int64_t x_stride;
    void *residual;
    int64_t residual_stride;
    const void *weight;   // [width] of x's numbers, or fp32:
    int64_t wide_weight;
    float eps;
    int64_t rows, heads, width;
    void *out;
    int64_t out_stride;
};

// q, k: [tokens, heads, dims], dense inside a token; the first 2 half dims turn.
struct RotaryCall {
    void *q;
    int64_t q_stride, q_heads;
    void *k;
    int64_t k_stride, k_heads, dims;
    const int64_t *positions;
    const float *cos, *sin;  // [positions, half]
    int64_t half, tokens;
};

// x: [rows, 2 half] -> out: [rows, half].
struct GateMulCall {
    const void *x;
    int64_t x_stride, half, rows;
    int64_t gate;  // a Gate
    void *out;
};

// Rows `indices` of the table, times `scale` -> out: [rows, width].
struct GatherRowsCall {
    const void *table;
    int64_t table_stride;
    const int64_t *indices;
    int64_t rows, width;
    float scale;
    void *out;
};

namespace {

// Calls visit(start, count) for every vector of a row of `width` numbers; the last one may have fewer than W.
template <class Visit>
void for_vectors(int64_t width, Visit visit) {
    int64_t i = 0;
    for (; i + W <= width; i += W) visit(i, W);
    if (i < width) visit(i, static_cast<int>(width - i));
}

// The first `count` numbers from `p` on, zeros in the other lanes.
template <class V>
Vec load_part(const typename V::Number *p, int count) {
    if (count == W) return V::load_numbers(p);
    typename V::Number numbers[W] = {};
    memcpy(numbers, p, count * sizeof *p);
    return V::load_numbers(numbers);
}

template <class V>
void store_part(typename V::Number *p, Vec v, int count) {
    if (count == W) return V::store_numbers(p, v);
    typename V::Number numbers[W];
    V::store_numbers(numbers, v);
    memcpy(p, numbers, count * sizeof *p);
}

// Runs row(i) for all rows, on several threads where there are enough numbers to be worth it.
template <class Row>
void for_rows(int64_t rows, int64_t width, Row &row) {
    constexpr int64_t SHARE = 1 << 14;
    int64_t threads = 1 + rows * width / SHARE;
    if (threads > octavo_threads()) threads = octavo_threads();
    auto body = [&](int thread) {
        for (int64_t i = rows * thread / threads; i < rows * (thread + 1) / threads; i++) row(i);
    };
    on_threads(static_cast<int>(threads), body);
}

// out = x / rms(x) x weight. With `residual`: residual += x first, and its norm is taken. A weight of x's own numbers
// multiplies what has been rounded to one, a wider weight what has not.
template <class V, class Weight>
void norm_row(const typename V::Number *x, typename V::Number *residual, const typename Weight::Number *weight,
              float eps, int64_t width, typename V::Number *out) {
    Vec sum = splat(0);
    for_vectors(width, [&](int64_t i, int count) {
        Vec v = load_part<V>(x + i, count);
        if (residual) {
            v = V::rounded(add(v, load_part<V>(residual + i, count)));
            store_part<V>(residual + i, v, count);
        }
        sum = fma(v, v, sum);
    });
    const float mean = sum_of(sum) / static_cast<float>(width);
    const Vec scale = splat(1.0f / std::sqrt(mean + eps));
    const typename V::Number *from = residual ? residual : x;
    for_vectors(width, [&](int64_t i, int count) {
        Vec normed = mul(load_part<V>(from + i, count), scale);
        if (sizeof *weight == sizeof *x) normed = V::rounded(normed);
        store_part<V>(out + i, mul(normed, load_part<Weight>(weight + i, count)), count);
    });
}

// One head: pairs (i, i + half).
template <class V>
void rotate_head(typename V::Number *x, const float *cos, const float *sin, int64_t half) {
    for_vectors(half, [&](int64_t i, int count) {
        const Vec c = load_part<Fp32Numbers>(cos + i, count), s = load_part<Fp32Numbers>(sin + i, count);
        const Vec a = load_part<V>(x + i, count), b = load_part<V>(x + half + i, count);
        store_part<V>(x + i, sub(mul(a, c), mul(b, s)), count);
        store_part<V>(x + half + i, add(mul(b, c), mul(a, s)), count);
    });
}

// out = gate(x[0, half)) x x[half, 2 half), gate(...) rounded on the way.
template <class V, Gate GATE>
void gate_row(const typename V::Number *x, int64_t half, typename V::Number *out) {
    for_vectors(half, [&](int64_t i, int count) {
        store_part<V>(out + i, gated<V, GATE>(load_part<V>(x + i, count), load_part<V>(x + half + i, count)), count);
    });
}

template <class V>
struct Elementwise {
    using Number = typename V::Number;

    template <class Weight>
    static void norm(const NormCall &call) {
        const int64_t width = call.width;
        auto row = [&](int64_t i) {
            for (int64_t head = 0; head < call.heads; head++)
                norm_row<V, Weight>(
                    static_cast<const Number *>(call.x) + i * call.x_stride + head * width,
                    call.residual ? static_cast<Number *>(call.residual) + i * call.residual_stride : nullptr,
                    static_cast<const typename Weight::Number *>(call.weight), call.eps, width,
                    static_cast<Number *>(call.out) + i * call.out_stride + head * width);
        };
        for_rows(call.rows, call.heads * width, row);
    }

    static void rotary(const RotaryCall &call) {
        const int64_t dims = call.dims, half = call.half;
        auto row = [&](int64_t i) {
            const float *c = call.cos + call.positions[i] * half, *s = call.sin + call.positions[i] * half;
            Number *q = static_cast<Number *>(call.q) + i * call.q_stride;
            Number *k = static_cast<Number *>(call.k) + i * call.k_stride;
            for (int64_t head = 0; head < call.q_heads; head++) rotate_head<V>(q + head * dims, c, s, half);
            for (int64_t head = 0; head < call.k_heads; head++) rotate_head<V>(k + head * dims, c, s, half);
        };
        for_rows(call.tokens, (call.q_heads + call.k_heads) * dims, row);
    }

    static void gate_mul(const GateMulCall &call) {
        const auto with = [&](auto gate_one) {
            auto row = [&](int64_t i) {
                gate_one(static_cast<const Number *>(call.x) + i * call.x_stride, call.half,
                         static_cast<Number *>(call.out) + i * call.half);
            };
            for_rows(call.rows, 4 * call.half, row);
        };
        if (call.gate == static_cast<int64_t>(Gate::SILU)) with(gate_row<V, Gate::SILU>);
        else with(gate_row<V, Gate::GELU_TANH>);
    }

    static void gather_rows(const GatherRowsCall &call) {
        const Vec scale = splat(call.scale);
        auto row = [&](int64_t i) {
            const Number *from = static_cast<const Number *>(call.table) + call.indices[i] * call.table_stride;
            Number *to = static_cast<Number *>(call.out) + i * call.width;
            if (call.scale == 1.0f) memcpy(to, from, call.width * sizeof(Number));
            else for_vectors(call.width, [&](int64_t j, int count) {
                store_part<V>(to + j, mul(load_part<V>(from + j, count), scale), count);
            });
        };
        for_rows(call.rows, call.width, row);
    }
};

}  // namespace

#define ELEMENTWISE_ENTRIES(format, isa, V)                                                              \
    extern "C" int32_t octavo_norm_##format##_##isa(const NormCall *call) {                              \
        call->wide_weight ? Elementwise<V>::norm<Fp32Numbers>(*call) : Elementwise<V>::norm<V>(*call);   \
        return 0;                                                                                        \
    }                                                                                                    \
    extern "C" int32_t octavo_rotary_##format##_##isa(const RotaryCall *call) {                          \
        Elementwise<V>::rotary(*call);                                                                   \
        return 0;                                                                                        \
    }                                                                                                    \
    extern "C" int32_t octavo_gate_mul_##format##_##isa(const GateMulCall *call) {                       \
        Elementwise<V>::gate_mul(*call);                                                                 \
        return 0;                                                                                        \
    }                                                                                                    \
    extern "C" int32_t octavo_gather_rows_##format##_##isa(const GatherRowsCall *call) {                 \
        Elementwise<V>::gather_rows(*call);                                                              \
        return 0;                                                                                        \
    }
