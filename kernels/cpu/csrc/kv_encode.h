// Numbers of a head to codes and scales of a KV format: the formulas of `kernels.reference.kv_formats`, bit for bit.
// Loops without branches over fp32 and its bits, which compilers turn into vectors of any instruction set; nothing in
// them can be contracted or reordered.

#pragma once

#include "kv_format.h"
#include "vec.h"

namespace {

constexpr int32_t MAGNITUDE = 0x7fffffff, INFINITE = 0x7f800000;  // of a float's bits; above INFINITE: not a number
constexpr uint16_t NAN_SCALE = 0x7e00;
constexpr float LEAST_SCALE = 0x1p-14f, MOST_SCALE = 65504;
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
int32_t fp8_of(float x) {
    const int32_t bits = bits_of(x), magnitude = bits & MAGNITUDE;
    const int32_t code = narrowed<EXPONENT, MANTISSA>(magnitude < LARGEST ? magnitude : LARGEST) | (bits >> 24 & 0x80);
    return magnitude > INFINITE ? 0x7f : code;
}
// Codes are bytes: 0 to 255.
inline int32_t e4m3_of(float x) { return fp8_of<4, 3, 0x43e00000>(x); }  // 448
inline int32_t e5m2_of(float x) { return fp8_of<5, 2, 0x47600000>(x); }  // 57344

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

inline int32_t int8_of(float x) {
    x = x != x ? 0 : x;
    x = x < -127 ? -127 : x;
    x = x > 127 ? 127 : x;
    return bits_of(x + ROUND) & 0xff;
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

// The scale of a head that has one. NAN_SCALE where a number is not finite.
inline uint16_t scale_of_head(const float *x, int64_t dims, float largest_code) {
    const int32_t largest = largest_of(x, dims);
    return largest >= INFINITE ? NAN_SCALE : scale_of(of_bits(largest), largest_code);
}

// What codes read as.
inline float float_of_int8(int32_t code) { return static_cast<float>((code ^ 0x80) - 0x80); }
inline float float_of_int4(int32_t code) { return static_cast<float>(code); }
inline float float_of_e4m3(int32_t code) {
    const int32_t magnitude = code & 0x7f;
    const float normal = of_bits((magnitude << 20) + (120 << 23)), small = static_cast<float>(magnitude) * 0x1p-9f;
    const float x = magnitude < 8 ? small : normal;
    return code & 0x80 ? -x : x;
}

// Codes of x with a scale of its own, which is returned. CODE: e4m3_of or int8_of.
template <int32_t CODE(float)>
uint16_t encode_scaled(const float *x, int64_t dims, float largest_code, uint8_t *__restrict codes) {
    const uint16_t scale = scale_of_head(x, dims, largest_code);
    if (scale == NAN_SCALE) {
        memset(codes, 0, dims);
        return scale;
    }
    const float divisor = float_of_fp16(scale);
    for (int64_t i = 0; i < dims; i++) codes[i] = static_cast<uint8_t>(CODE(x[i] / divisor));
    return scale;
}

template <int32_t CODE(float)>
void encode_unscaled(const float *x, int64_t dims, uint8_t *__restrict codes) {
    for (int64_t i = 0; i < dims; i++) codes[i] = static_cast<uint8_t>(CODE(x[i]));
}

// Bits and keys that are in the order of the floats, -0 before 0; its own inverse.
inline int32_t ordered(int32_t bits) { return bits ^ (bits >> 31 & MAGNITUDE); }

struct Int4Scale {
    uint16_t scale, zero;
};

inline int32_t int4_of(float x) { return bits_of(clamped(x, 0, 15) + ROUND) & 15; }

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

// Codes, one in a byte, of a group.
inline Int4Scale encode_int4(const float *x, uint8_t *__restrict codes) {
    const Int4Scale own = int4_scale_of(x);
    if (own.scale == NAN_SCALE) {
        memset(codes, 0, INT4_GROUP);
        return own;
    }
    const float start = float_of_fp16(own.zero), divisor = float_of_fp16(own.scale);
    for (int i = 0; i < INT4_GROUP; i++) codes[i] = static_cast<uint8_t>(int4_of((x[i] - start) / divisor));
    return own;
}

constexpr int LANES = 16;  // keys that are encoded side by side, where there is feedback

// The numbers that the codes of a group of dims can stand for, of LANES keys: code x scale + zero.
struct Grid {
    float scale[LANES], zero[LANES];
    int32_t live[LANES];  // all ones, or 0 where a number of the group is not finite

    void set(int lane, uint16_t its_scale, uint16_t its_zero) {
        const bool is_finite = its_scale != NAN_SCALE;
        scale[lane] = is_finite ? float_of_fp16(its_scale) : 1;
        zero[lane] = float_of_fp16(its_zero);
        live[lane] = is_finite ? -1 : 0;
    }
};

// A format's codes, what they read as, and the most that one of them is said to have lost, in steps of the scale.
struct FedInt4 {
    static constexpr float MOST_LOST = 1;
    static int32_t of(float x) { return int4_of(x); }
    static float read(int32_t code) { return float_of_int4(code); }
};
struct FedInt8 {
    static constexpr float MOST_LOST = 1;
    static int32_t of(float x) { return int8_of(x); }
    static float read(int32_t code) { return float_of_int8(code); }
};
struct FedE4m3 {
    static constexpr float MOST_LOST = 32;
    static int32_t of(float x) { return e4m3_of(x); }
    static float read(int32_t code) { return float_of_e4m3(code); }
};

// Codes of one dim of LANES keys that do not notice each other, and what these have lost. x: `stride` numbers apart.
template <class Codes>
void encode_lanes(const Grid &grid, const float *__restrict x, int64_t stride, int32_t *__restrict codes,
                  float *__restrict error) {
    for (int lane = 0; lane < LANES; lane++) {
        const float now = of_bits(bits_of(x[lane * stride]) & grid.live[lane]), scale = grid.scale[lane];
        const int32_t code = Codes::of((now - grid.zero[lane]) / scale) & grid.live[lane];
        const float most = scale * Codes::MOST_LOST, lost = now - (Codes::read(code) * scale + grid.zero[lane]);
        codes[lane] = code;
        error[lane] = of_bits(bits_of(clamped(lost, -most, most)) & grid.live[lane]);
    }
}

// Subtracts LANES errors of dim i from the dims behind it, by their shares, of tokens that lie side by side.
// x: [dims, LANES]; shares: [dims] of dim i.
inline void hand_on(const float *error, const float *__restrict shares, int64_t i, int64_t dims, float *__restrict x) {
    static_assert(LANES % W == 0, "whole vectors");
    Vec errors[LANES / W];
    for (int part = 0; part < LANES / W; part++) errors[part] = load(error + part * W);
    while (++i < dims) {
        const Vec share = splat(shares[i]);
        for (int part = 0; part < LANES / W; part++) {
            float *to = x + i * LANES + part * W;
            store(to, sub(load(to), mul(errors[part], share)));
        }
    }
}

// The same of one key. x: [dims], of which those up to dim i are lost.
inline void hand_on(float error, const float *__restrict shares, int64_t i, int64_t dims, float *__restrict x) {
    i++;
    if (dims % W == 0)
        for (i = i / W * W; i < dims; i += W) store(x + i, sub(load(x + i), mul(splat(error), load(shares + i))));
    for (; i < dims; i++) x[i] -= error * shares[i];
}

}  // namespace
