// The numbers of a format as vectors of floats, for arithmetic that is fp32 inside and rounds as often as torch does.

#pragma once

#include "vec.h"

namespace {

struct Fp32Numbers {
    using Number = float;
    static Vec load_numbers(const float *p) { return load(p); }
    static void store_numbers(float *p, Vec v) { store(p, v); }
    static Vec rounded(Vec v) { return v; }
};

struct Bf16Numbers {
    using Number = uint16_t;

#if defined(__AVX512BF16__)
    static Vec load_numbers(const uint16_t *p) { return widened(_mm256_loadu_epi16(p)); }
    static void store_numbers(uint16_t *p, Vec v) { _mm256_storeu_epi16(p, narrowed(v)); }
    static Vec rounded(Vec v) { return widened(narrowed(v)); }
    static __m256i narrowed(Vec v) { return (__m256i)_mm512_cvtneps_pbh(v); }

  private:
    static Vec widened(__m256i numbers) { return as_floats(shift_up_16(_mm512_cvtepu16_epi32(numbers))); }
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

// What a gate does to its numbers. Mirrored in kernels/cpu/elementwise.py.
enum class Gate : int64_t { NONE, SILU, GELU_TANH };

// v / (1 + e^-z). FINE: closer than a result rounded to bf16 ever shows.
template <bool FINE>
Vec times_sigmoid(Vec v, Vec z) {
    const Vec x = sub(splat(0), z);
    return div(v, add(splat(1), FINE ? exp_of(x) : exp2_negative(mul(x, splat(0x1.715476p+0f)))));
}

// Below -87 it is silu(-87), which is -2^-119.
template <bool FINE>
Vec silu(Vec v) {
    v = max(splat(-87), v);
    return times_sigmoid<FINE>(v, v);
}

// v (1 + tanh(u)) / 2 is v / (1 + e^-2u); 2u = sqrt(8 / pi) (v + 0.044715 v^3). Below -10 it is that of -10, -2^-123.
template <bool FINE>
Vec gelu_tanh(Vec v) {
    v = max(splat(-10), v);
    return times_sigmoid<FINE>(v, mul(v, fma(mul(v, v), splat(0x1.2444f2p-4f), splat(0x1.988454p+0f))));
}

// gate(v) x up of numbers: gate(v) rounded on the way; the caller rounds the product.
template <class Numbers, Gate GATE>
Vec gated(Vec v, Vec up) {
    static_assert(GATE != Gate::NONE, "");
    constexpr bool FINE = sizeof(typename Numbers::Number) == 4;
    return mul(Numbers::rounded(GATE == Gate::SILU ? silu<FINE>(v) : gelu_tanh<FINE>(v)), up);
}

}  // namespace
