// Norms, rotary embedding and gates, row by row: fp32 inside, one fixed order of additions, so that a row's bits depend on
// the row only. Contracts: kernels/ops.py.

#pragma once

#include "formats.h"
#include "parallel.h"

namespace {

// Numbers of a format as vectors of floats.
struct Fp32Vectors {
    using Number = float;
    static Vec load_numbers(const float *p) { return load(p); }
    static void store_numbers(float *p, Vec v) { store(p, v); }
    static Vec rounded(Vec v) { return v; }
};

struct Bf16Vectors {
    using Number = uint16_t;

#if defined(__AVX512BF16__)
    static Vec load_numbers(const uint16_t *p) { return widened(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p))); }
    static void store_numbers(uint16_t *p, Vec v) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), narrowed(v)); }
    static Vec rounded(Vec v) { return widened(narrowed(v)); }

  private:
    static Vec widened(__m256i numbers) { return as_floats(shift_up_16(_mm512_cvtepu16_epi32(numbers))); }
    static __m256i narrowed(Vec v) { return (__m256i)_mm512_cvtneps_pbh(v); }
#else
    // Loops that compilers turn into the vector instructions of any set.
    static Vec load_numbers(const uint16_t *p) {
        uint32_t lanes[W];
        for (int i = 0; i < W; i++) lanes[i] = static_cast<uint32_t>(p[i]) << 16;
        return as_floats(load_units(lanes));
    }
    static void store_numbers(uint16_t *p, Vec v) {
        float lanes[W];
        store(lanes, v);
        for (int i = 0; i < W; i++) p[i] = to_bf16(lanes[i]);
    }
    static Vec rounded(Vec v) {
        uint16_t numbers[W];
        store_numbers(numbers, v);
        return load_numbers(numbers);
    }
#endif
};

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
void for_rows(int64_t rows, int64_t width, int64_t most_threads, Row &row) {
    constexpr int64_t SHARE = 1 << 14;
    int64_t threads = 1 + rows * width / SHARE;
    if (threads > most_threads) threads = most_threads;
    auto body = [&](int thread) {
        for (int64_t i = rows * thread / threads; i < rows * (thread + 1) / threads; i++) row(i);
    };
    on_threads(static_cast<int>(threads), body);
}

// out = x / rms(x) x weight. With `residual`: residual += x first, and its norm is taken.
template <class V>
void norm_row(const typename V::Number *x, typename V::Number *residual, const typename V::Number *weight, float eps,
              int64_t width, typename V::Number *out) {
    Vec sums[4] = {splat(0), splat(0), splat(0), splat(0)};
    for_vectors(width, [&](int64_t i, int count) {
        Vec v = load_part<V>(x + i, count);
        if (residual) {
            v = V::rounded(add(v, load_part<V>(residual + i, count)));
            store_part<V>(residual + i, v, count);
        }
        Vec &sum = sums[i / W % 4];
        sum = fma(v, v, sum);
    });
    const float mean = sum_of(add(add(sums[0], sums[1]), add(sums[2], sums[3]))) / static_cast<float>(width);
    const Vec scale = splat(1.0f / std::sqrt(mean + eps));
    const typename V::Number *from = residual ? residual : x;
    for_vectors(width, [&](int64_t i, int count) {
        const Vec normed = V::rounded(mul(load_part<V>(from + i, count), scale));
        store_part<V>(out + i, mul(normed, load_part<V>(weight + i, count)), count);
    });
}

// One head: pairs (i, i + half).
template <class V>
void rotate_head(typename V::Number *x, const float *cos, const float *sin, int64_t half) {
    for_vectors(half, [&](int64_t i, int count) {
        const Vec c = load_part<Fp32Vectors>(cos + i, count), s = load_part<Fp32Vectors>(sin + i, count);
        const Vec a = load_part<V>(x + i, count), b = load_part<V>(x + half + i, count);
        store_part<V>(x + i, sub(mul(a, c), mul(b, s)), count);
        store_part<V>(x + half + i, add(mul(b, c), mul(a, s)), count);
    });
}

// v / (1 + e^-v); e^-v as 2^p. FINE: what p lost in rounding is put back (a result that is rounded to bf16 never shows it).
// Below -87, where silu is less than 2^-118, e^-v stays at that size.
template <bool FINE>
Vec silu(Vec v) {
    const Vec zero = splat(0), log2_e = splat(0x1.715476p+0f);
    if (!FINE) return div(v, add(splat(1), exp2_negative(sub(zero, max(splat(-126), mul(v, log2_e))))));
    const Vec x = max(splat(-104), sub(zero, max(splat(-87), v)));
    const Vec p = mul(x, log2_e), lost = fma(x, splat(0x1.4ae0cp-26f), fma(x, log2_e, sub(zero, p)));
    const Vec e = exp2_negative(p);
    return div(v, add(splat(1), fma(e, mul(lost, splat(0x1.62e43p-1f)), e)));
}

// out = silu(x[0, half)) x x[half, 2 half), silu rounded on the way.
template <class V>
void gate_row(const typename V::Number *x, int64_t half, typename V::Number *out) {
    for_vectors(half, [&](int64_t i, int count) {
        const Vec gate = V::rounded(silu<sizeof *x == 4>(load_part<V>(x + i, count)));
        store_part<V>(out + i, mul(gate, load_part<V>(x + half + i, count)), count);
    });
}

template <class V>
struct Elementwise {
    using Number = typename V::Number;

    // x, out: [rows, width]; residual the same or null; all strides but the width's in numbers.
    static void norm(const void *x, int64_t x_stride, void *residual, int64_t residual_stride, const void *weight, float eps,
                     int64_t rows, int64_t width, void *out, int64_t threads) {
        auto row = [&](int64_t i) {
            norm_row<V>(static_cast<const Number *>(x) + i * x_stride,
                        residual ? static_cast<Number *>(residual) + i * residual_stride : nullptr,
                        static_cast<const Number *>(weight), eps, width, static_cast<Number *>(out) + i * width);
        };
        for_rows(rows, width, threads, row);
    }

    // x: [tokens, heads, 2 half], dense inside a token. cos, sin: [positions, half].
    static void rotary(void *q, int64_t q_stride, int64_t q_heads, void *k, int64_t k_stride, int64_t k_heads,
                       const int64_t *positions, const float *cos, const float *sin, int64_t half, int64_t tokens,
                       int64_t threads) {
        auto row = [&](int64_t i) {
            const float *c = cos + positions[i] * half, *s = sin + positions[i] * half;
            Number *q_row = static_cast<Number *>(q) + i * q_stride, *k_row = static_cast<Number *>(k) + i * k_stride;
            for (int64_t head = 0; head < q_heads; head++) rotate_head<V>(q_row + head * 2 * half, c, s, half);
            for (int64_t head = 0; head < k_heads; head++) rotate_head<V>(k_row + head * 2 * half, c, s, half);
        };
        for_rows(tokens, (q_heads + k_heads) * 2 * half, threads, row);
    }

    // x: [rows, 2 half] -> out: [rows, half].
    static void gate(const void *x, int64_t x_stride, int64_t half, int64_t rows, void *out, int64_t threads) {
        auto row = [&](int64_t i) {
            gate_row<V>(static_cast<const Number *>(x) + i * x_stride, half, static_cast<Number *>(out) + i * half);
        };
        for_rows(rows, 4 * half, threads, row);
    }
};

}  // namespace

#define ELEMENTWISE_ENTRIES(format, isa, V)                                                                               \
    extern "C" void octavo_norm_##format##_##isa(const void *x, int64_t x_stride, void *residual, int64_t residual_stride, \
                                                 const void *weight, float eps, int64_t rows, int64_t width, void *out,    \
                                                 int64_t threads) {                                                        \
        Elementwise<V>::norm(x, x_stride, residual, residual_stride, weight, eps, rows, width, out, threads);              \
    }                                                                                                                      \
    extern "C" void octavo_rotary_##format##_##isa(void *q, int64_t q_stride, int64_t q_heads, void *k, int64_t k_stride,  \
                                                   int64_t k_heads, const int64_t *positions, const float *cos,            \
                                                   const float *sin, int64_t half, int64_t tokens, int64_t threads) {      \
        Elementwise<V>::rotary(q, q_stride, q_heads, k, k_stride, k_heads, positions, cos, sin, half, tokens, threads);    \
    }                                                                                                                      \
    extern "C" void octavo_silu_mul_##format##_##isa(const void *x, int64_t x_stride, int64_t half, int64_t rows,          \
                                                     void *out, int64_t threads) {                                         \
        Elementwise<V>::gate(x, x_stride, half, rows, out, threads);                                                       \
    }
