// What a softmax over the vocabulary divides by its sum, and sums of that, row by row: a row's bits depend on the row
// only. Contract: kernels/ops.py. The struct is mirrored in kernels/cpu/softmax.py; all strides are in numbers.

#pragma once

#include "parallel.h"
#include "vec.h"

// x, shifted, weights: [rows, LANES x groups], dense inside a row.
struct SoftmaxCall {
    const float *x;
    int64_t x_stride;
    const float *temperature;  // [rows]
    float *shifted;            // may be x
    int64_t shifted_stride;
    float *weights;
    int64_t weights_stride;
    int64_t rows, groups;
    float *sums;  // [rows, groups]
};

namespace {

constexpr int64_t LANES = 64;

inline float add(float a, float b) { return a + b; }

// The sum of load(lane), load(lane + STEP), load(lane + 2 STEP), ... by halving: the first half of them and the second
// half are added number by number, until one is left.
template <int STEP, class Load>
__attribute__((always_inline)) inline auto halved(const Load &load, int lane) {
    if constexpr (STEP == LANES) return load(lane);
    else return add(halved<2 * STEP>(load, lane), halved<2 * STEP>(load, lane + STEP));
}

inline void sum_groups(const float *weights, int64_t groups, float *sums) {
    int64_t group = 0;
    for (; group + W <= groups; group += W)
        store(sums + group, halved<1>([&](int lane) { return load(weights + lane * groups + group); }, 0));
    for (; group < groups; group++)
        sums[group] = halved<1>([&](int lane) { return weights[lane * groups + group]; }, 0);
}

inline void softmax_row(const float *x, float temperature, int64_t width, float *shifted, float *weights) {
    Vec maximum = load(x);
    for (int64_t i = W; i < width; i += W) maximum = max(maximum, load(x + i));
    const Vec top = splat(max_of(maximum)), divisor = splat(temperature);
    for (int64_t i = 0; i < width; i += W) {
        const Vec v = div(sub(load(x + i), top), divisor);
        store(shifted + i, v);
        store(weights + i, exp_of(v));
    }
}

inline void softmax(const SoftmaxCall &call) {
    const int64_t threads = call.rows < octavo_threads() ? call.rows : octavo_threads();
    auto body = [&](int thread) {
        for (int64_t i = call.rows * thread / threads; i < call.rows * (thread + 1) / threads; i++) {
            float *weights = call.weights + i * call.weights_stride;
            softmax_row(call.x + i * call.x_stride, call.temperature[i], LANES * call.groups,
                        call.shifted + i * call.shifted_stride, weights);
            sum_groups(weights, call.groups, call.sums + i * call.groups);
        }
    };
    on_threads(static_cast<int>(threads), body);
}

}  // namespace

#define SOFTMAX_ENTRIES(isa)                                                     \
    extern "C" int32_t octavo_softmax_weights_fp32_##isa(const SoftmaxCall *call) { \
        softmax(*call);                                                          \
        return 0;                                                                \
    }
