// Norms, rotary embedding and gates, row by row: fp32 inside, one fixed order of additions, so that a row's bits depend
// on the row only. Contracts: kernels/ops.py.

#pragma once

#include "numbers.h"
#include "parallel.h"

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

    // x, out: [rows, heads, width], dense inside a row; residual the same with one head, or null; weight [width] of x's
    // numbers or (wide) fp32. All strides in numbers.
    template <class Weight>
    static void norm(const void *x, int64_t x_stride, void *residual, int64_t residual_stride, const void *weight,
                     float eps, int64_t rows, int64_t heads, int64_t width, void *out) {
        auto row = [&](int64_t i) {
            for (int64_t head = 0; head < heads; head++)
                norm_row<V, Weight>(static_cast<const Number *>(x) + i * x_stride + head * width,
                                    residual ? static_cast<Number *>(residual) + i * residual_stride : nullptr,
                                    static_cast<const typename Weight::Number *>(weight), eps, width,
                                    static_cast<Number *>(out) + (i * heads + head) * width);
        };
        for_rows(rows, heads * width, row);
    }

    // q, k: [tokens, heads, dims], dense inside a token; the first 2 half dims turn. cos, sin: [positions, half].
    static void rotary(void *q, int64_t q_stride, int64_t q_heads, void *k, int64_t k_stride, int64_t k_heads,
                       int64_t dims, const int64_t *positions, const float *cos, const float *sin, int64_t half,
                       int64_t tokens) {
        auto row = [&](int64_t i) {
            const float *c = cos + positions[i] * half, *s = sin + positions[i] * half;
            Number *q_row = static_cast<Number *>(q) + i * q_stride, *k_row = static_cast<Number *>(k) + i * k_stride;
            for (int64_t head = 0; head < q_heads; head++) rotate_head<V>(q_row + head * dims, c, s, half);
            for (int64_t head = 0; head < k_heads; head++) rotate_head<V>(k_row + head * dims, c, s, half);
        };
        for_rows(tokens, (q_heads + k_heads) * dims, row);
    }

    // x: [rows, 2 half] -> out: [rows, half].
    static void gate(const void *x, int64_t x_stride, int64_t half, int64_t rows, Gate gate, void *out) {
        const auto with = [&](auto gate_one) {
            auto row = [&](int64_t i) {
                gate_one(static_cast<const Number *>(x) + i * x_stride, half, static_cast<Number *>(out) + i * half);
            };
            for_rows(rows, 4 * half, row);
        };
        gate == Gate::SILU ? with(gate_row<V, Gate::SILU>) : with(gate_row<V, Gate::GELU_TANH>);
    }
};

}  // namespace

#define ELEMENTWISE_ENTRIES(format, isa, V)                                                                       \
    extern "C" void octavo_norm_##format##_##isa(                                                                 \
        const void *x, int64_t x_stride, void *residual, int64_t residual_stride, const void *weight,             \
        int64_t wide_weight, float eps, int64_t rows, int64_t heads, int64_t width, void *out) {                  \
        const auto norm = wide_weight ? Elementwise<V>::norm<Fp32Numbers> : Elementwise<V>::norm<V>;              \
        norm(x, x_stride, residual, residual_stride, weight, eps, rows, heads, width, out);                       \
    }                                                                                                             \
    extern "C" void octavo_rotary_##format##_##isa(                                                               \
        void *q, int64_t q_stride, int64_t q_heads, void *k, int64_t k_stride, int64_t k_heads, int64_t dims,     \
        const int64_t *positions, const float *cos, const float *sin, int64_t half, int64_t tokens) {             \
        Elementwise<V>::rotary(q, q_stride, q_heads, k, k_stride, k_heads, dims, positions, cos, sin, half, tokens); \
    }                                                                                                             \
    extern "C" void octavo_gate_mul_##format##_##isa(const void *x, int64_t x_stride, int64_t half, int64_t rows, \
                                                     int64_t gate, void *out) {                                   \
        Elementwise<V>::gate(x, x_stride, half, rows, static_cast<Gate>(gate), out);                              \
    }
