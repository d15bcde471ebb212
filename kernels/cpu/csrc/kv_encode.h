// Numbers of a head to codes and scales of a KV format: the formulas of `kernels.reference.kv_formats`, bit for bit.
// Loops without branches over fp32 and its bits, which compilers turn into vectors of any instruction set; nothing in
// them can be contracted or reordered.

#pragma once

#include "kv_format.h"
#include "vec.h"

namespace {

constexpr int32_t MAGNITUDE = 0x7fffffff, INFINITE = 0x7f800000;  // of a float's bits; above INFINITE: not a number
constexpr uint16_t NAN_SCALE = 0x7e00;
constexpr float LEAST_SCALE = 6.1e-5f, MOST_SCALE = 65504;
constexpr float ROUND = 0x1.8p23f;  // added to a small number it leaves the nearest whole number in the low bits

// Bits are signed integers: not every instruction set compares unsigned ones.
inline int32_t bits_of(float x) {
    int32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}
inline float of_bits(int32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

// The nearest number of a format with fewer bits, of what it can hold: ties to even, gradual underflow. magnitude: bits
// of a float without sign, no larger than the format's largest.
template <int EXPONENT, int MANTISSA>
int32_t narrowed(int32_t magnitude) {
    constexpr int shift = 23 - MANTISSA;
    constexpr int32_t bias = 127 - ((1 << (EXPONENT - 1)) - 1);
    constexpr int32_t step = (bias + shift + 1) << 23;  // a float whose last digit is the format's smallest number
    const int32_t normal = (magnitude + ((1 << (shift - 1)) - 1 - (bias << 23)) + (magnitude >> shift & 1)) >> shift;
    const int32_t small = bits_of(of_bits(magnitude) + of_bits(step)) - step;
    return magnitude < (bias + 1) << 23 ? small : normal;
}

template <int EXPONENT, int MANTISSA, int32_t LARGEST>
uint8_t fp8_of(float x) {
    const int32_t bits = bits_of(x), magnitude = bits & MAGNITUDE;
    const int32_t code = narrowed<EXPONENT, MANTISSA>(magnitude < LARGEST ? magnitude : LARGEST) | (bits >> 24 & 0x80);
    return static_cast<uint8_t>(magnitude > INFINITE ? 0x7f : code);
}
inline uint8_t e4m3_of(float x) { return fp8_of<4, 3, 0x43e00000>(x); }  // 448
inline uint8_t e5m2_of(float x) { return fp8_of<5, 2, 0x47600000>(x); }  // 57344

// As IEEE 754 has it: too large is infinite.
inline uint16_t fp16_of(float x) {
    constexpr int32_t limit = 0x477ff000;  // 65520 ties with 2^16, the even one
    const int32_t bits = bits_of(x), magnitude = bits & MAGNITUDE;
    const int32_t code = magnitude < limit ? narrowed<5, 10>(magnitude) : magnitude > INFINITE ? 0x7e00 : 0x7c00;
    return static_cast<uint16_t>(code | (bits >> 16 & 0x8000));
}

// Of a finite one.
inline float float_of_fp16(uint16_t x) {
    const float magnitude = of_bits((x & 0x7fff) << 13) * 0x1p112f;
    return x & 0x8000 ? -magnitude : magnitude;
}

inline uint8_t int8_of(float x) {
    x = x != x ? 0 : x;
    x = x < -127 ? -127 : x;
    x = x > 127 ? 127 : x;
    return static_cast<uint8_t>(bits_of(x + ROUND));
}

inline float clamped(float x, float least, float most) { return x < least ? least : x > most ? most : x; }

// span / steps, as it is stored.
inline uint16_t scale_of(float span, float steps) { return fp16_of(clamped(span / steps, LEAST_SCALE, MOST_SCALE)); }

// Bits of the largest magnitude; those of what is not finite are larger than those of all that is.
inline int32_t largest_of(const float *x, int64_t count) {
    int32_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        const int32_t magnitude = bits_of(x[i]) & MAGNITUDE;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

// What codes read as.
inline float float_of_int8(uint8_t code) { return static_cast<int8_t>(code); }
inline float float_of_int4(uint8_t code) { return code; }
inline float float_of_e4m3(uint8_t code) {
    const int32_t magnitude = code & 0x7f;
    const float normal = of_bits((magnitude << 20) + (120 << 23)), small = static_cast<float>(magnitude) * 0x1p-9f;
    const float x = magnitude < 8 ? small : normal;
    return code & 0x80 ? -x : x;
}

// A group of dims [begin, end) and the numbers that its codes stand for: code x scale + zero.
struct Grid {
    int64_t begin, end;
    float scale, zero;
};

// A head's feedback: how much of a dim's error is subtracted from each later dim. Null: nothing is.
struct Feedback {
    const float *shares;  // [dims, dims]
    int64_t dims;
};

// Codes of a group, from x of all of the head's dims; with feedback x of later dims is changed.
template <uint8_t CODE(float), float VALUE(uint8_t)>
void encode_on(const Grid &grid, float most_error, float *__restrict x, const Feedback &feedback,
               uint8_t *__restrict codes) {
    if (!feedback.shares) {
        for (int64_t i = grid.begin; i < grid.end; i++) codes[i] = CODE((x[i] - grid.zero) / grid.scale);
        return;
    }
    const float most = grid.scale * most_error;
    for (int64_t i = grid.begin; i < grid.end; i++) {
        const uint8_t code = codes[i] = CODE((x[i] - grid.zero) / grid.scale);
        const float error = clamped(x[i] - (VALUE(code) * grid.scale + grid.zero), -most, most);
        const float *__restrict shares = feedback.shares + i * feedback.dims;
        for (int64_t j = i + 1; j < feedback.dims; j++) x[j] -= error * shares[j];
    }
}

// Codes of a head with one scale, which is returned. CODE: e4m3_of or int8_of.
template <uint8_t CODE(float), float VALUE(uint8_t)>
uint16_t encode_scaled(float *x, int64_t dims, float largest_code, float most_error, const float *shares,
                       uint8_t *codes) {
    const int32_t largest = largest_of(x, dims);
    if (largest >= INFINITE) {
        memset(codes, 0, dims);
        return NAN_SCALE;
    }
    const uint16_t scale = scale_of(of_bits(largest), largest_code);
    encode_on<CODE, VALUE>({0, dims, float_of_fp16(scale), 0}, most_error, x, {shares, dims}, codes);
    return scale;
}

template <uint8_t CODE(float)>
void encode_unscaled(const float *x, int64_t dims, uint8_t *__restrict codes) {
    for (int64_t i = 0; i < dims; i++) codes[i] = CODE(x[i]);
}

// Bits and keys that are in the order of the floats, -0 before 0; its own inverse.
inline int32_t ordered(int32_t bits) { return bits ^ (bits >> 31 & MAGNITUDE); }

struct Int4Scale {
    uint16_t scale, zero;
};

inline uint8_t int4_of(float x) { return static_cast<uint8_t>(bits_of(clamped(x, 0, 15) + ROUND) & 15); }

// Of a group, as its numbers are before any feedback. NAN_SCALE where one is not finite.
inline Int4Scale int4_scale_of(const float *x) {
    int32_t least = INT32_MAX, most = INT32_MIN;
    for (int i = 0; i < INT4_GROUP; i++) {
        const int32_t key = ordered(bits_of(x[i]));
        least = key < least ? key : least;
        most = key > most ? key : most;
    }
    if (most >= INFINITE || least <= ordered(INFINITE | ~MAGNITUDE)) return {NAN_SCALE, 0};
    const float low = of_bits(ordered(least)) + 0.0f;  // no -0: it is as low as 0
    return {scale_of(of_bits(ordered(most)) - low, 15), fp16_of(clamped(low, -MOST_SCALE, MOST_SCALE))};
}

// Codes, one in a byte, of a head, and the scales of its groups.
inline void encode_int4(float *x, int64_t dims, const float *shares, uint8_t *codes, Int4Scale *scales) {
    const int64_t groups = dims / INT4_GROUP;
    for (int64_t group = 0; group < groups; group++) scales[group] = int4_scale_of(x + group * INT4_GROUP);
    for (int64_t group = 0; group < groups; group++) {
        const int64_t begin = group * INT4_GROUP, end = begin + INT4_GROUP;
        const Int4Scale own = scales[group];
        if (own.scale == NAN_SCALE) memset(codes + begin, 0, INT4_GROUP);
        else encode_on<int4_of, float_of_int4>({begin, end, float_of_fp16(own.scale), float_of_fp16(own.zero)}, 1, x,
                                               {shares, dims}, codes);
    }
}

}  // namespace
