// Rows as the model has them: queries, turned into what the engine multiplies, and results.

#pragma once

#include "attention_pages.h"
#include "rotation.h"

namespace {

template <class F>
class ModelRows {
    using Number = typename F::Number;

    const AttentionCall &call;
    const int64_t dims, width;  // of a row: dims; rounded up to whole vectors
    const bool same_numbers;  // as the engine's
    float *const floats;
    uint32_t *const numbers;  // of the engine's format, or of the model's

  public:
    static int64_t scratch_floats(const AttentionCall &call) {
        const int64_t room = round_up(call.head_dim, W) + W;
        return Scratch::size<float>(room) + Scratch::size<uint32_t>(room);
    }

    ModelRows(const AttentionCall &call, Scratch scratch)
        : call(call),
          dims(call.head_dim),
          width(round_up(call.head_dim, W)),
          same_numbers(call.numbers == F::STORED),
          floats(scratch.take<float>(width + W)),
          numbers(scratch.take<uint32_t>(width + W)) {
        memset(floats, 0, sizeof(float) * (width + W));
    }

    // The row's query, multiplied by K's channels, which then K need not be, and rotated as K is. Valid until the next
    // one is asked for.
    const Number *query(const Panel &panel, int row) const {
        const int64_t from = panel.token_of(row) * call.q_stride + panel.head_of(row, call.group()) * dims;
        if (same_numbers && !call.k.signs && !call.k.channels) return static_cast<const Number *>(call.q) + from;
        if (call.numbers == KvFormat::BF16)
            widen(static_cast<const uint16_t *>(call.q) + from);
        else
            memcpy(floats, static_cast<const float *>(call.q) + from, sizeof(float) * dims);
        if (call.k.channels) multiply(call.k.channels + panel.kv_head_of(row) * dims);
        if (call.k.signs) rotate(floats, call.k.signs, dims);
        pack<F>();
        return reinterpret_cast<const Number *>(numbers);
    }

    // values: [width] as V is stored, and what to divide them by.
    void write(const Panel &panel, int row, const float *values, Vec weight) const {
        for (int64_t d = 0; d < width; d += W) store(floats + d, div(load(values + d), weight));
        if (call.v.signs) unrotate(floats, call.v.signs, dims);
        if (call.v.channels) multiply(call.v.channels + panel.kv_head_of(row) * dims);
        const int64_t to = (panel.token_of(row) * call.heads + panel.head_of(row, call.group())) * dims;
        if (call.numbers == KvFormat::BF16) {
            pack<Bf16>();
            memcpy(static_cast<uint16_t *>(call.out) + to, numbers, sizeof(uint16_t) * dims);
        } else {
            memcpy(static_cast<float *>(call.out) + to, floats, sizeof(float) * dims);
        }
    }

  private:
    void widen(const uint16_t *from) const {
        for (int64_t d = 0; d < dims; d++) {
            const uint32_t bits = static_cast<uint32_t>(from[d]) << 16;
            memcpy(floats + d, &bits, sizeof bits);
        }
    }

    void multiply(const float *channels) const {
        for (int64_t d = 0; d < dims; d++) floats[d] *= channels[d];
    }

    // All of `floats`, in the numbers of G.
    template <class G>
    void pack() const {
        for (int64_t d = 0; d < width; d += G::PAIR * W) {
            Vec part[G::PAIR];
            for (int i = 0; i < G::PAIR; i++) part[i] = load(floats + d + i * W);
            G::pack(numbers + d / G::PAIR, part);
        }
    }
};

}  // namespace
