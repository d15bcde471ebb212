// How the numbers of a KV format lie in 32-bit units, and the dot product of two vectors of units.
//
//     fp32: a unit is one number.    bf16: a unit is a pair of numbers (dims in K, tokens in V), the first one low.

#pragma once

#include "vec.h"

namespace {

struct Fp32 {
    using Number = float;
    static constexpr int PAIR = 1;
    static Vec dot(Vec sum, Units a, Units b) { return fma(as_floats(a), as_floats(b), sum); }
    // Writes N vectors of floats as numbers, in order.
    template <int N>
    static void pack(uint32_t *to, const Vec (&v)[N]) {
        for (int i = 0; i < N; i++) store(reinterpret_cast<float *>(to) + i * W, v[i]);
    }
};

struct Bf16 {
    using Number = uint16_t;
    static constexpr int PAIR = 2;

#if defined(__AVX512BF16__)
    static Vec dot(Vec sum, Units a, Units b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
    template <int N>
    static void pack(uint32_t *to, const Vec (&v)[N]) {
        for (int i = 0; i < N; i += 2)
            _mm512_storeu_si512(to + i / 2 * W, (__m512i)_mm512_cvtne2ps_pbh(v[i + 1], v[i]));
    }
#else
    // bf16 is the upper half of a float: products are exact, the first of the pair is added first.
    static Vec dot(Vec sum, Units a, Units b) {
        const Units high = splat_unit(0xffff0000);
        sum = fma(as_floats(shift_up_16(a)), as_floats(shift_up_16(b)), sum);
        return fma(as_floats(and_units(a, high)), as_floats(and_units(b, high)), sum);
    }
    template <int N>
    static void pack(uint32_t *to, const Vec (&v)[N]) {
        float lanes[N * W];
        uint16_t numbers[N * W];
        for (int i = 0; i < N; i++) store(lanes + i * W, v[i]);
        for (int i = 0; i < N * W; i++) numbers[i] = to_bf16(lanes[i]);
        memcpy(to, numbers, sizeof numbers);
    }
#endif
};

}  // namespace
