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

// v / (1 + e^-v), e^-v as 2^p. FINE: what p lost in rounding is put back (a result rounded to bf16 never shows it).
// Below -87 it is silu(-87), which is -2^-119.
template <bool FINE>
Vec silu(Vec v) {
    const Vec zero = splat(0), log2_e = splat(0x1.715476p+0f);
    v = max(splat(-87), v);
    const Vec x = FINE ? max(splat(-104), sub(zero, v)) : sub(zero, v);
    const Vec p = mul(x, log2_e);
    Vec e = exp2_negative(p);
    if (FINE) {
        const Vec lost = fma(x, splat(0x1.4ae0cp-26f), fma(x, log2_e, sub(zero, p)));
        e = fma(e, mul(lost, splat(0x1.62e43p-1f)), e);
    }
    return div(v, add(splat(1), e));
}

// silu(gate) x up of numbers: silu rounded on the way; the caller rounds the product.
template <class Numbers>
Vec gated(Vec gate, Vec up) {
    return mul(Numbers::rounded(silu<sizeof(typename Numbers::Number) == 4>(gate)), up);
}

}  // namespace
