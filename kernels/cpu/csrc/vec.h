// Float vectors of the instruction set that the including file is compiled for. `Vec`: W floats, `Units`: W times 32
// bits. Every multiply-add is explicit and every reduction has a fixed order, so results do not depend on the compiler.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)

constexpr int W = 16;
using Vec = __m512;
using Units = __m512i;

inline Vec load(const float *p) { return _mm512_loadu_ps(p); }
inline void store(float *p, Vec v) { _mm512_storeu_ps(p, v); }
inline Units load_units(const uint32_t *p) { return _mm512_loadu_si512(p); }
inline Vec splat(float x) { return _mm512_set1_ps(x); }
inline Units splat_unit(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
// The second operand wins where one is not a number.
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline float max_of(Vec v) { return _mm512_reduce_max_ps(v); }
inline Vec as_floats(Units u) { return _mm512_castsi512_ps(u); }
inline Units as_units(Vec v) { return _mm512_castps_si512(v); }
inline void store_units(uint32_t *p, Units u) { _mm512_storeu_si512(p, u); }
inline Units and_units(Units a, Units b) { return _mm512_and_si512(a, b); }
inline Units or_units(Units a, Units b) { return _mm512_or_si512(a, b); }
inline Units add_units(Units a, Units b) { return _mm512_add_epi32(a, b); }
inline Units shift_up_16(Units u) { return _mm512_slli_epi32(u, 16); }
inline Units shift_down_16(Units u) { return _mm512_srli_epi32(u, 16); }
inline Units shift_down_4(Units u) { return _mm512_srli_epi32(u, 4); }
// yes where v is a number.
inline Vec if_number(Vec v, Vec yes, Vec no) {
    return _mm512_mask_mov_ps(no, _mm512_cmp_ps_mask(v, v, _CMP_ORD_Q), yes);
}
inline void store_upper_halves(uint16_t *p, Units u) {
    _mm256_storeu_epi16(p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(u, 16)));
}
inline Units widen_bytes(const uint8_t *p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
}
inline Vec to_floats(Units u) { return _mm512_cvtepi32_ps(u); }
inline Vec from_int8(const uint8_t *p) {
    return to_floats(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))));
}
inline Vec from_fp16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_epi16(p)); }
// Lanes from n on become -inf.
inline Vec keep_first(Vec v, int n) {
    if (n >= W) return v;
    return _mm512_mask_mov_ps(splat(-INFINITY), n <= 0 ? 0 : (1u << n) - 1, v);
}
// The lanes [begin, end) of v, the others of `other`.
inline Vec between(int begin, int end, Vec v, Vec other) {
    const auto below = [](int n) { return n <= 0 ? 0u : n >= W ? 0xffffu : (1u << n) - 1; };
    return _mm512_mask_mov_ps(other, static_cast<__mmask16>(below(end) & ~below(begin)), v);
}
// The largest lane of each of four.
inline __m128 max_of_four(const Vec (&v)[4]) {
    const Vec ab = max(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
    const Vec cd = max(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
    const __m512d ab2 = _mm512_castps_pd(ab), cd2 = _mm512_castps_pd(cd);
    Vec abcd = max(_mm512_castpd_ps(_mm512_unpacklo_pd(ab2, cd2)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab2, cd2)));
    abcd = max(abcd, _mm512_shuffle_f32x4(abcd, abcd, 0x4e));
    abcd = max(abcd, _mm512_shuffle_f32x4(abcd, abcd, 0xb1));
    return _mm512_castps512_ps128(abcd);
}
// Lane i < count: the largest lane of row(i); the others are 0 or what further rows have.
template <class Row>
Vec max_of_each(int count, Row row) {
    const auto four = [&](int i) {
        const Vec v[4] = {row(i), row(i + 1), row(i + 2), row(i + 3)};
        return max_of_four(v);
    };
    Vec all = _mm512_zextps128_ps512(four(0));
    if (count > 4) all = _mm512_insertf32x4(all, four(4), 1);
    if (count > 8) all = _mm512_insertf32x4(all, four(8), 2);
    if (count > 12) all = _mm512_insertf32x4(all, four(12), 3);
    return all;
}
inline Vec shift_up_23(Vec v) { return as_floats(_mm512_slli_epi32(_mm512_castps_si512(v), 23)); }
// Lane i gets lane i ^ STRIDE, a power of two less than W.
template <int STRIDE>
Vec swap_lanes(Vec v) {
    if (STRIDE == 1) return _mm512_permute_ps(v, 0xb1);
    if (STRIDE == 2) return _mm512_permute_ps(v, 0x4e);
    return STRIDE == 4 ? _mm512_shuffle_f32x4(v, v, 0xb1) : _mm512_shuffle_f32x4(v, v, 0x4e);
}

#elif defined(__AVX2__)

constexpr int W = 8;
using Vec = __m256;
using Units = __m256i;

inline Vec load(const float *p) { return _mm256_loadu_ps(p); }
inline void store(float *p, Vec v) { _mm256_storeu_ps(p, v); }
inline Units load_units(const uint32_t *p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)); }
inline Vec splat(float x) { return _mm256_set1_ps(x); }
inline Units splat_unit(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline float max_of(Vec v) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}
inline Vec as_floats(Units u) { return _mm256_castsi256_ps(u); }
inline Units as_units(Vec v) { return _mm256_castps_si256(v); }
inline void store_units(uint32_t *p, Units u) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), u); }
inline Units and_units(Units a, Units b) { return _mm256_and_si256(a, b); }
inline Units or_units(Units a, Units b) { return _mm256_or_si256(a, b); }
inline Units add_units(Units a, Units b) { return _mm256_add_epi32(a, b); }
inline Units shift_up_16(Units u) { return _mm256_slli_epi32(u, 16); }
inline Units shift_down_16(Units u) { return _mm256_srli_epi32(u, 16); }
inline Units shift_down_4(Units u) { return _mm256_srli_epi32(u, 4); }
inline Vec if_number(Vec v, Vec yes, Vec no) { return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(v, v, _CMP_ORD_Q)); }
inline void store_upper_halves(uint16_t *p, Units u) {
    const __m256i halves = _mm256_srli_epi32(u, 16);
    const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p), packed);
}
inline Units widen_bytes(const uint8_t *p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p)));
}
inline Vec to_floats(Units u) { return _mm256_cvtepi32_ps(u); }
inline Vec from_int8(const uint8_t *p) {
    return to_floats(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p))));
}
inline Vec from_fp16(const uint16_t *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
}
inline Vec keep_first(Vec v, int n) {
    if (n >= W) return v;
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_blendv_ps(splat(-INFINITY), v, as_floats(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), lanes)));
}
inline Vec between(int begin, int end, Vec v, Vec other) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i before = _mm256_cmpgt_epi32(_mm256_set1_epi32(begin), lanes);
    const __m256i seen = _mm256_andnot_si256(before, _mm256_cmpgt_epi32(_mm256_set1_epi32(end), lanes));
    return _mm256_blendv_ps(other, v, as_floats(seen));
}
template <class Row>
Vec max_of_each(int count, Row row) {
    float largest[W] = {};
    for (int i = 0; i < W && i < count; i++) largest[i] = max_of(row(i));
    return load(largest);
}
inline Vec shift_up_23(Vec v) { return as_floats(_mm256_slli_epi32(_mm256_castps_si256(v), 23)); }
template <int STRIDE>
Vec swap_lanes(Vec v) {
    if (STRIDE == 1) return _mm256_permute_ps(v, 0xb1);
    return STRIDE == 2 ? _mm256_permute_ps(v, 0x4e) : _mm256_permute2f128_ps(v, v, 1);
}

#else

// Four lanes by the compiler's vector extension: any architecture. No fused multiply-add: product and sum round apart.
constexpr int W = 4;
typedef float Vec __attribute__((vector_size(16)));
typedef uint32_t Units __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));

inline Vec load(const float *p) {
    Vec v;
    memcpy(&v, p, sizeof v);
    return v;
}
inline void store(float *p, Vec v) { memcpy(p, &v, sizeof v); }
inline Units load_units(const uint32_t *p) {
    Units v;
    memcpy(&v, p, sizeof v);
    return v;
}
inline Vec splat(float x) { return Vec{x, x, x, x}; }
inline Units splat_unit(uint32_t x) { return Units{x, x, x, x}; }
inline Vec add(Vec a, Vec b) { return a + b; }
inline Vec sub(Vec a, Vec b) { return a - b; }
inline Vec mul(Vec a, Vec b) { return a * b; }
inline Vec div(Vec a, Vec b) { return a / b; }
inline Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
inline Vec select(Ints mask, Vec yes, Vec no) { return (Vec)(((Ints)yes & mask) | ((Ints)no & ~mask)); }
inline Vec max(Vec a, Vec b) { return select(a > b, a, b); }
inline float max_of(Vec v) {
    float best = v[0];
    for (int i = 1; i < W; i++) best = v[i] > best || v[i] != v[i] ? v[i] : best;
    return best;
}
inline Vec as_floats(Units u) { return (Vec)u; }
inline Units as_units(Vec v) { return (Units)v; }
inline void store_units(uint32_t *p, Units u) { memcpy(p, &u, sizeof u); }
inline Units and_units(Units a, Units b) { return a & b; }
inline Units or_units(Units a, Units b) { return a | b; }
inline Units add_units(Units a, Units b) { return a + b; }
inline Units shift_up_16(Units u) { return u << 16; }
inline Units shift_down_16(Units u) { return u >> 16; }
inline Units shift_down_4(Units u) { return u >> 4; }
inline Vec if_number(Vec v, Vec yes, Vec no) { return select(v == v, yes, no); }
inline void store_upper_halves(uint16_t *p, Units u) {
    for (int i = 0; i < W; i++) p[i] = static_cast<uint16_t>(u[i] >> 16);
}
inline Units widen_bytes(const uint8_t *p) { return Units{p[0], p[1], p[2], p[3]}; }
inline Vec to_floats(Units u) { return __builtin_convertvector((Ints)u, Vec); }
inline Vec from_int8(const uint8_t *p) {
    const int8_t *codes = reinterpret_cast<const int8_t *>(p);
    return __builtin_convertvector((Ints{codes[0], codes[1], codes[2], codes[3]}), Vec);
}
// The bits of an fp16 number, moved to those of a float, are 2^-112 of its value; the largest exponent means infinity or
// NaN in both.
inline Vec from_fp16(const uint16_t *p) {
    const Units bits{p[0], p[1], p[2], p[3]}, magnitude = (bits & 0x7fff) << 13;
    const Ints special = magnitude >= splat_unit(0x7c00 << 13);
    const Units value = (Units)((Vec)magnitude * splat(0x1p112f)) | ((Units)special & 0x7f800000);
    return (Vec)(value | (bits & 0x8000) << 16);
}
inline Vec keep_first(Vec v, int n) { return select(Ints{0, 1, 2, 3} < Ints{n, n, n, n}, v, splat(-INFINITY)); }
inline Vec between(int begin, int end, Vec v, Vec other) {
    const Ints lanes{0, 1, 2, 3};
    return select((lanes >= begin) & (lanes < end), v, other);
}
template <class Row>
Vec max_of_each(int count, Row row) {
    float largest[W] = {};
    for (int i = 0; i < W && i < count; i++) largest[i] = max_of(row(i));
    return load(largest);
}
inline Vec shift_up_23(Vec v) { return (Vec)((Units)v << 23); }
template <int STRIDE>
Vec swap_lanes(Vec v) {
    return Vec{v[STRIDE], v[1 ^ STRIDE], v[2 ^ STRIDE], v[3 ^ STRIDE]};
}

#endif

inline void prefetch(const void *p) { __builtin_prefetch(p, 0, 2); }

// The second one wins where one is not a number.
inline float larger(float a, float b) { return a > b ? a : b; }

// Lane after lane, the first ones first.
inline float sum_of(Vec v) {
    float lanes[W], sum = 0;
    store(lanes, v);
    for (float lane : lanes) sum += lane;
    return sum;
}

// 2^x for x <= 0 (and up to 127), by a polynomial: exactly 1 at 0, 0 below -126.5 (for -inf too), NaN for NaN. The
// coefficients, of the highest power first and without the last, which is 1, are minimax ones on [-0.5, 0.5].
template <int DEGREE>
Vec exp2_by(const float (&coefficients)[DEGREE], Vec x) {
    // A float of this size has no fraction bits, and its low bits are the whole number + 127.
    const Vec magic = splat(0x1.8p23f + 127);
    x = max(splat(-127.0f), x);
    const Vec shifted = add(x, magic);
    const Vec f = sub(x, sub(shifted, magic));
    Vec p = splat(coefficients[0]);
    for (int i = 1; i < DEGREE; i++) p = fma(p, f, splat(coefficients[i]));
    p = fma(p, f, splat(1.0f));
    return mul(p, shift_up_23(shifted));
}

// Within 1 ulp.
inline Vec exp2_negative(Vec x) {
    return exp2_by({0x1.41fbbcp-13f, 0x1.5f3e54p-10f, 0x1.3b2d4cp-7f, 0x1.c6aee8p-5f, 0x1.ebfbdcp-3f, 0x1.62e43p-1f}, x);
}

// e^x for x <= 0 (and up to 87): within 2 ulps with a fused multiply-add, exactly 1 at 0, 0 below -88 (for -inf too), NaN
// for NaN. What the exponent of 2 lost in rounding is put back.
inline Vec exp_of(Vec x) {
    const Vec log2_e = splat(0x1.715476p+0f);
    x = max(splat(-104), x);
    const Vec p = mul(x, log2_e);
    const Vec lost = fma(x, splat(0x1.4ae0cp-26f), fma(x, log2_e, sub(splat(0), p)));
    const Vec e = exp2_negative(p);
    return fma(e, mul(lost, splat(0x1.62e43p-1f)), e);
}

#if defined(__AVX512F__)
// Within 8.7e-5 of it, 0 below -126: the polynomial is a minimax one on [0, 1]. An instruction finds the fraction of x,
// another one multiplies by 2 to its whole part.
inline Vec exp2_negative_coarse(Vec x) {
    const Vec f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    Vec p = fma(splat(0x1.3baaa6p-4f), f, splat(0x1.d2378ap-3f));
    p = fma(p, f, splat(0x1.63e658p-1f));
    p = fma(p, f, splat(1.0f));
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, splat(-126), _CMP_NLT_UQ), p, x);
}
#else
// Within 1.02e-4 of it.
inline Vec exp2_negative_coarse(Vec x) { return exp2_by({0x1.c2a1cp-5f, 0x1.f00c5p-3f, 0x1.62f5fcp-1f}, x); }
#endif

// tanh(x) within 6 ulps, 1 but for 2 of them from 9 on, NaN for NaN: x P(x^2) / Q(x^2), minimax on [-9, 9].
inline Vec tanh_of(Vec x) {
    const Vec zero = splat(0), least = splat(-9);
    x = sub(zero, max(least, sub(zero, max(least, x))));
    const Vec square = mul(x, x);
    Vec p = splat(1.33550923e-08f);
    p = fma(p, square, splat(2.06094287e-05f));
    p = fma(p, square, splat(0.00349561074f));
    p = fma(p, square, splat(0.133810446f));
    p = fma(p, square, splat(1.0f));
    Vec q = splat(7.77674494e-07f);
    q = fma(q, square, splat(0.00032856708f));
    q = fma(q, square, splat(0.0258770697f));
    q = fma(q, square, splat(0.467143595f));
    q = fma(q, square, splat(1.0f));
    return div(mul(x, p), q);
}

inline uint16_t to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return static_cast<uint16_t>(bits >> 16 | 0x40);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace
