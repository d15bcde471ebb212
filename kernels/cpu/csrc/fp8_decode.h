// Codes of eight bits as numbers: by way of fp16, which holds all of them and which most CPUs widen at no cost; as bf16 at
// once where there are vectors of 16-bit lanes.

#pragma once

#include "formats.h"

namespace {

// An e4m3 code becomes an fp16 number that is 2^-8 of it.
constexpr float E4M3_OVER_FP16 = 256;

#if defined(__AVX512BW__)
constexpr bool HAS_FP8_PAIRS = true;

// Units of bf16 numbers, of each the first code from `first`, the other one from `second`. Codes without an exponent,
// and those from SPECIAL on, which are no finite numbers, are rare: where there are any, all go by way of fp16.
template <class Codes>
Units fp8_pairs(const uint8_t *first, const uint8_t *second) {
    constexpr int mantissa = Codes::MANTISSA, shift = 7 - mantissa, fp16_shift = 10 - mantissa;
    constexpr int exponent = 0x7f >> mantissa << 7, bias = 127 - (64 >> mantissa) + 1;
    const auto load = [](const uint8_t *p) { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(p)); };
    const auto all = [](int bits) { return _mm512_set1_epi16(static_cast<short>(bits)); };
    const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(load(first)), load(second), 1);
    const Units codes = _mm512_cvtepi8_epi16(both);
    const Units bits = and_units(_mm512_slli_epi16(codes, shift), all(0x8000 | 0x7f << shift));
    const __mmask32 small = _mm512_testn_epi16_mask(bits, all(exponent));
    __mmask32 special = 0;
    if (Codes::SPECIAL < 0x80)
        special = _mm512_cmpge_epi16_mask(and_units(bits, all(0x7fff)), all(Codes::SPECIAL << shift));
    if (__builtin_expect(small | special, 0)) {
        Units halves = and_units(_mm512_slli_epi16(codes, fp16_shift), all(0x8000 | 0x7f << fp16_shift));
        if (Codes::SPECIAL == 0x7f) halves = _mm512_mask_mov_epi16(halves, special, all(0x7e00));
        const Vec unit = splat(mantissa == 3 ? E4M3_OVER_FP16 : 1);
        const Vec numbers[2] = {mul(_mm512_cvtph_ps(_mm512_castsi512_si256(halves)), unit),
                                mul(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1)), unit)};
        return Bf16::exact(numbers);
    }
    return Bf16::interleaved(_mm512_add_epi16(bits, all(bias << 7)));
}
#else
constexpr bool HAS_FP8_PAIRS = false;

template <class Codes>
Units fp8_pairs(const uint8_t *, const uint8_t *);
#endif

template <class Codes>
struct Fp8 {
    using Code = uint8_t;
    template <class F>
    static Units units(const uint8_t *from, int64_t stride) {
        return fp8_pairs<Codes>(from, from + stride);
    }
};

struct E4m3 : Fp8<E4m3> {
    static constexpr int MANTISSA = 3, SPECIAL = 0x80;  // that a number is none, its token's scale says
    static void to_fp16(const uint8_t *from, int64_t n, uint16_t *to) {
        for (int64_t i = 0; i < n; i++) to[i] = static_cast<uint16_t>(static_cast<int8_t>(from[i]) * 128 & 0xbf80);
    }
};

// Where no scale says that a number is none, its code does.
struct StaticE4m3 : Fp8<StaticE4m3> {
    static constexpr int MANTISSA = 3, SPECIAL = 0x7f;
    static void to_fp16(const uint8_t *from, int64_t n, uint16_t *to) {
        for (int64_t i = 0; i < n; i++) {
            const uint16_t number = static_cast<uint16_t>(static_cast<int8_t>(from[i]) * 128 & 0xbf80);
            to[i] = (number & 0x3f80) == 0x3f80 ? 0x7e00 : number;
        }
    }
};

struct E5m2 : Fp8<E5m2> {
    static constexpr int MANTISSA = 2, SPECIAL = 0x7c;
    static void to_fp16(const uint8_t *from, int64_t n, uint16_t *to) {
        for (int64_t i = 0; i < n; i++) to[i] = static_cast<uint16_t>(from[i] << 8);
    }
};

}  // namespace
