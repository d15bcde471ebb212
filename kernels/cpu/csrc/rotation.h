// The rotation that spreads a head's numbers before they are quantised: signs, then a fast Walsh-Hadamard transform of
// blocks as long as the largest power of two that divides the head's dims. The transform is its own inverse. Sums of
// two, and one product with a constant at the end: bits are the same on every instruction set, and those of
// `kernels.reference.kv_formats`.

#pragma once

#include "vec.h"

namespace {

// (a + b, a - b) for lanes STRIDE apart. Products with 1 and -1 are exact.
template <int STRIDE>
Vec lane_butterflies(Vec v) {
    float signs[W];
    for (int i = 0; i < W; i++) signs[i] = i & STRIDE ? -1 : 1;
    return fma(v, load(signs), swap_lanes<STRIDE>(v));
}

// The butterflies of strides 1, 2, 4 ... less than W and than `block`.
inline Vec lane_butterflies(Vec v, int64_t block) {
    if (block > 1) v = lane_butterflies<1>(v);
    if (block > 2) v = lane_butterflies<2>(v);
    if (W > 4 && block > 4) v = lane_butterflies<4 % W>(v);
    if (W > 8 && block > 8) v = lane_butterflies<8 % W>(v);
    return v;
}

// A whole block, N vectors, in registers.
template <int N>
void hadamard_block(float *x, Vec factor) {
    Vec v[N];
    for (int i = 0; i < N; i++) v[i] = lane_butterflies(load(x + i * W), W);
    for (int stride = 1; stride < N; stride *= 2)
        for (int i = 0; i < N; i++) {
            const Vec a = v[i & ~stride], b = v[i | stride];
            if (i & stride) v[i - stride] = add(a, b), v[i] = sub(a, b);
        }
    for (int i = 0; i < N; i++) store(x + i * W, mul(v[i], factor));
}

// Whether it was one of the usual sizes.
inline bool hadamard_block(float *x, int64_t block, float factor) {
    if (block == 4 * W) return hadamard_block<4>(x, splat(factor)), true;
    if (block == 8 * W) return hadamard_block<8>(x, splat(factor)), true;
    if (block == 16 * W) return hadamard_block<16>(x, splat(factor)), true;
    return false;
}

inline void hadamard(float *x, int64_t dims) {
    const int64_t block = dims & -dims;
    const float factor = static_cast<float>(1 / std::sqrt(static_cast<double>(block)));
    if (block == dims && hadamard_block(x, block, factor)) return;
    int64_t stride = 1;
    if (dims % W == 0) {
        for (int64_t i = 0; i < dims; i += W) store(x + i, lane_butterflies(load(x + i), block));
        for (stride = W; stride < block; stride *= 2)
            for (int64_t start = 0; start < dims; start += 2 * stride)
                for (int64_t i = start; i < start + stride; i += W) {
                    const Vec a = load(x + i), b = load(x + i + stride);
                    store(x + i, add(a, b));
                    store(x + i + stride, sub(a, b));
                }
    }
    for (; stride < block; stride *= 2)
        for (int64_t start = 0; start < dims; start += 2 * stride)
            for (int64_t i = start; i < start + stride; i++) {
                const float a = x[i], b = x[i + stride];
                x[i] = a + b;
                x[i + stride] = a - b;
            }
    for (int64_t i = 0; i < dims; i++) x[i] *= factor;
}

// x, signs (1 or -1): [dims]
inline void rotate(float *x, const float *signs, int64_t dims) {
    for (int64_t i = 0; i < dims; i++) x[i] *= signs[i];
    hadamard(x, dims);
}

inline void unrotate(float *x, const float *signs, int64_t dims) {
    hadamard(x, dims);
    for (int64_t i = 0; i < dims; i++) x[i] *= signs[i];
}

}  // namespace
