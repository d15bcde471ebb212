// Writes K and V of new tokens into their pages. Numbers of the model that a format keeps as they are move straight to
// their places; others become codes and scales first (kv_encode.h), a head of a token at a time.

#pragma once

#include <cstdlib>
#include <type_traits>

#include "kv_encode.h"
#include "parallel.h"
#include "rotation.h"

// Where K or V of a layer goes. Offsets in bytes, inside a block.
struct StoreHalf {
    int64_t format;  // KvFormat
    int64_t codes, scales, zeros;  // offsets; negative: there are none
    const float *centre;  // [kv_heads, head_dim], what is subtracted from numbers, or null
    const float *channels;  // [kv_heads, head_dim], what numbers are divided by, or null
    const float *signs;  // [head_dim]; null: not rotated
    const float *feedback;  // [kv_heads, head_dim, head_dim], or null
};

// A layer's pages.
struct StorePages {
    StoreHalf k, v;
    uint8_t *pool;  // [blocks, block_bytes]
    int64_t block_bytes, block_size, kv_heads, head_dim;
};

// K and V of new tokens.
struct StoreRows {
    const void *k, *v;  // [tokens, kv_heads, head_dim], dense inside a row
    int64_t k_stride, v_stride;  // numbers between rows
    const int64_t *slots;  // [tokens]; negative: skip
    int64_t tokens;
};

namespace {

using Bf16Bits = uint16_t;

// A token's place.
struct Slot {
    uint8_t *block;
    int64_t offset, block_size;
};

// Numbers of one head in a block, K: [count / PAIR, block_size, PAIR], V: [block_size / PAIR, count, PAIR].
template <bool IS_K, int PAIR, class Number>
void place(const Number *__restrict from, int64_t count, const Slot &slot, Number *__restrict head) {
    if (IS_K) {
        Number *to = head + slot.offset * PAIR;
        for (int64_t d = 0; d < count; d += PAIR) memcpy(to + d * slot.block_size, from + d, sizeof(Number) * PAIR);
    } else {
        Number *to = head + slot.offset / PAIR * count * PAIR + slot.offset % PAIR;
        for (int64_t d = 0; d < count; d++) to[d * PAIR] = from[d];
    }
}

// Of K dims 2i and 2i + 1 share a byte, of V dims i and i + 16 of a group; the first lies low.
template <bool IS_K>
void place_int4(const uint8_t *codes, int64_t dims, const Slot &slot, uint8_t *head) {
    constexpr int half = INT4_GROUP / 2;
    if (IS_K) {
        uint8_t *to = head + slot.offset;
        for (int64_t i = 0; i < dims / 2; i++)
            to[i * slot.block_size] = static_cast<uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
    } else {
        uint8_t *__restrict to = head + slot.offset * dims / 2;
        for (int64_t group = 0; group < dims; group += INT4_GROUP)
            for (int i = 0; i < half; i++)
                to[group / 2 + i] = static_cast<uint8_t>(codes[group + i] | codes[group + half + i] << 4);
    }
}

// Puts a scale or zero point, of group `index` counted over all heads.
inline void put(uint16_t number, int64_t index, const Slot &slot, int64_t part) {
    memcpy(slot.block + part + (index * slot.block_size + slot.offset) * 2, &number, 2);
}

// One worker's memory for a head: its numbers, and what they become.
struct Row {
    float *x;
    void *numbers;
    Int4Scale *scales;

    static int64_t bytes(int64_t dims) { return (dims * 12 + 63) / 64 * 64; }
    static Row in(uint8_t *memory, int64_t dims) {
        return {reinterpret_cast<float *>(memory), memory + dims * 4, reinterpret_cast<Int4Scale *>(memory + dims * 8)};
    }
};

inline void widen(const float *from, int64_t dims, float *to) { memcpy(to, from, dims * sizeof(float)); }
inline void widen(const Bf16Bits *from, int64_t dims, float *__restrict to) {
    for (int64_t i = 0; i < dims; i++) to[i] = of_bits(static_cast<int32_t>(static_cast<uint32_t>(from[i]) << 16));
}

template <bool IS_K>
void store_quantised(const StorePages &pages, const StoreHalf &half, const Slot &slot, int64_t head, const Row &row) {
    const int64_t dims = pages.head_dim;
    uint8_t *codes = static_cast<uint8_t *>(row.numbers), *to = slot.block + half.codes;
    const int64_t per_head = head * dims, groups = dims / INT4_GROUP;
    const float *shares = half.feedback ? half.feedback + per_head * dims : nullptr;
    if (half.centre)
        for (int64_t i = 0; i < dims; i++) row.x[i] -= half.centre[per_head + i];
    if (half.channels)
        for (int64_t i = 0; i < dims; i++) row.x[i] /= half.channels[per_head + i];
    if (half.signs) rotate(row.x, half.signs, dims);
    switch (static_cast<KvFormat>(half.format)) {
        case KvFormat::FP8_E4M3:
            if (half.scales < 0) encode_unscaled<e4m3_of>(row.x, dims, codes);
            else put(encode_scaled<e4m3_of, float_of_e4m3>(row.x, dims, 448, 32, shares, codes), head, slot, half.scales);
            break;
        case KvFormat::INT8:
            if (half.scales < 0) encode_unscaled<int8_of>(row.x, dims, codes);
            else put(encode_scaled<int8_of, float_of_int8>(row.x, dims, 127, 1, shares, codes), head, slot, half.scales);
            break;
        case KvFormat::INT4:
            encode_int4(row.x, dims, shares, codes, row.scales);
            for (int64_t group = 0; group < groups; group++) {
                put(row.scales[group].scale, head * groups + group, slot, half.scales);
                put(row.scales[group].zero, head * groups + group, slot, half.zeros);
            }
            return place_int4<IS_K>(codes, dims, slot, to + per_head / 2 * slot.block_size);
        default:
            encode_unscaled<e5m2_of>(row.x, dims, codes);
    }
    place<IS_K, 1>(codes, dims, slot, to + per_head * slot.block_size);
}

// Numbers of the model in another format, a head.
template <bool IS_K, class Model>
void store_converted(const StorePages &pages, const StoreHalf &half, const Slot &slot, int64_t head, const Model *x,
                     const Row &row) {
    const int64_t dims = pages.head_dim, at = head * dims * slot.block_size;
    const KvFormat format = static_cast<KvFormat>(half.format);
    uint8_t *codes = slot.block + half.codes;
    widen(x, dims, row.x);
    if (format == KvFormat::FP32) return place<IS_K, 1>(row.x, dims, slot, reinterpret_cast<float *>(codes) + at);
    const bool is_quantised = format != KvFormat::BF16 && format != KvFormat::FP16;
    if (is_quantised) return store_quantised<IS_K>(pages, half, slot, head, row);
    uint16_t *numbers = static_cast<uint16_t *>(row.numbers);
    for (int64_t i = 0; i < dims; i++) numbers[i] = format == KvFormat::BF16 ? to_bf16(row.x[i]) : fp16_of(row.x[i]);
    place<IS_K, 2>(numbers, dims, slot, reinterpret_cast<uint16_t *>(codes) + at);
}

template <bool IS_K, class Model>
void store_heads(const StorePages &pages, const StoreHalf &half, const Slot &slot, const Model *x, const Row &row) {
    constexpr bool WIDE = std::is_same<Model, float>::value;
    const int64_t dims = pages.head_dim;
    if (static_cast<KvFormat>(half.format) == (WIDE ? KvFormat::FP32 : KvFormat::BF16)) {
        Model *to = reinterpret_cast<Model *>(slot.block + half.codes);
        for (int64_t head = 0; head < pages.kv_heads; head++, x += dims, to += dims * slot.block_size)
            place<IS_K, WIDE ? 1 : 2>(x, dims, slot, to);
    } else {
        for (int64_t head = 0; head < pages.kv_heads; head++, x += dims)
            store_converted<IS_K>(pages, half, slot, head, x, row);
    }
}

template <class Model>
void store_token(const StorePages &pages, const StoreRows &rows, int64_t token, const Row &row) {
    const int64_t slot = rows.slots[token];
    if (slot < 0) return;
    const int64_t size = pages.block_size;
    const Slot to = {pages.pool + slot / size * pages.block_bytes, slot % size, size};
    store_heads<true>(pages, pages.k, to, static_cast<const Model *>(rows.k) + token * rows.k_stride, row);
    store_heads<false>(pages, pages.v, to, static_cast<const Model *>(rows.v) + token * rows.v_stride, row);
}

// Returns 1 where there is no memory.
template <class Model>
int32_t store_kv(const StorePages &pages, const StoreRows &rows) {
    constexpr int64_t NUMBERS_PER_THREAD = 1 << 15;  // fewer are not worth waking a thread
    const int64_t wanted = rows.tokens * pages.kv_heads * pages.head_dim / NUMBERS_PER_THREAD + 1;
    const int threads = static_cast<int>(wanted < octavo_threads() ? wanted : octavo_threads());
    const int64_t row_bytes = Row::bytes(pages.head_dim);
    uint8_t *memory = static_cast<uint8_t *>(malloc(threads * row_bytes));
    if (!memory) return 1;
    auto body = [&](int thread) {
        const Row row = Row::in(memory + thread * row_bytes, pages.head_dim);
        const int64_t end = rows.tokens * (thread + 1) / threads;
        for (int64_t token = rows.tokens * thread / threads; token < end; token++)
            store_token<Model>(pages, rows, token, row);
    };
    on_threads(threads, body);
    free(memory);
    return 0;
}

}  // namespace

#define STORE_ENTRIES(ISA)                                                                              \
    extern "C" int32_t octavo_store_kv_fp32_##ISA(const StorePages *pages, const StoreRows *rows) {     \
        return store_kv<float>(*pages, *rows);                                                          \
    }                                                                                                   \
    extern "C" int32_t octavo_store_kv_bf16_##ISA(const StorePages *pages, const StoreRows *rows) {     \
        return store_kv<Bf16Bits>(*pages, *rows);                                                       \
    }
