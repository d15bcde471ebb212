// How numbers of the two formats that are multiplied lie in 32-bit units, and the dot product of two vectors of
// units.
//
//     fp32: a unit is one number.    bf16: a unit is a pair of numbers (dims in K, tokens in V), the first one low.

#pragma once

#include "kv_format.h"
#include "vec.h"

namespace {

struct Fp32 {
    using Number = float;
    static constexpr KvFormat STORED = KvFormat::FP32;
    static constexpr int PAIR = 1;
    static Vec dot(Vec sum, Units a, Units b) { return fma(as_floats(a), as_floats(b), sum); }
    // Writes N vectors of floats as numbers, in order.
    template <int N>
    static void pack(uint32_t *to, const Vec (&v)[N]) {
        for (int i = 0; i < N; i++) store(reinterpret_cast<float *>(to) + i * W, v[i]);
    }
    // 2^x as exact as weights of the format need it, for x <= 0.
    static Vec weight_exp2(Vec x) { return exp2_negative(x); }
    // Units of floats: lane by lane, v[0] the first number of a unit.
    static Units rounded(const Vec (&v)[PAIR]) { return as_units(v[0]); }
    // The same of floats that are numbers of the format already.
    static Units exact(const Vec (&v)[PAIR]) { return as_units(v[0]); }
#if defined(__AVX512F__)
    // Units of the numbers that stand at `index`, of which the lowest four bits count, in a table of units.
    static Units looked_up(Units table, const Units (&index)[PAIR]) {
        return _mm512_permutexvar_epi32(index[0], table);
    }
#endif
};

struct Bf16 {
    using Number = uint16_t;
    static constexpr KvFormat STORED = KvFormat::BF16;
    static constexpr int PAIR = 2;

    static Vec weight_exp2(Vec x) { return exp2_negative_coarse(x); }
    static Units exact(const Vec (&v)[PAIR]) { return or_units(shift_down_16(as_units(v[0])), as_units(v[1])); }
#if defined(__AVX512F__)
    // Units of the first numbers, which are the lower half, and the others.
    static Units interleaved(__m512i numbers) {
        alignas(64) static constexpr uint16_t order[2 * W] = {
            0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
            8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
        return _mm512_permutexvar_epi16(_mm512_load_si512(order), numbers);
    }
    static Units looked_up(Units table, const Units (&index)[PAIR]) {
        const Units first = _mm512_permutexvar_epi32(index[0], table);
        return _mm512_mask_mov_epi16(first, 0xaaaaaaaa, _mm512_permutexvar_epi32(index[1], table));
    }
#endif

#if defined(__AVX512BF16__)
    static Vec dot(Vec sum, Units a, Units b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
    template <int N>
    static void pack(uint32_t *to, const Vec (&v)[N]) {
        for (int i = 0; i < N; i += 2)
            _mm512_storeu_si512(to + i / 2 * W, (__m512i)_mm512_cvtne2ps_pbh(v[i + 1], v[i]));
    }
    static Units rounded(const Vec (&v)[PAIR]) {
        return interleaved((__m512i)_mm512_cvtne2ps_pbh(v[1], v[0]));
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
        for (int i = 0; i < N; i++) store_upper_halves(reinterpret_cast<uint16_t *>(to) + i * W, rounded(v[i]));
    }
    static Units rounded(const Vec (&v)[PAIR]) {
        return or_units(shift_down_16(rounded(v[0])), and_units(rounded(v[1]), splat_unit(0xffff0000)));
    }

  private:
    // In upper halves, what `to_bf16` gives.
    static Units rounded(Vec v) {
        const Units bits = as_units(v), odd = and_units(shift_down_16(bits), splat_unit(1));
        const Units number = add_units(bits, add_units(odd, splat_unit(0x7fff)));
        const Units quiet = or_units(bits, splat_unit(0x400000));
        return as_units(if_number(v, as_floats(number), as_floats(quiet)));
    }
#endif
};

}  // namespace
