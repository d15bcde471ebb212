// Writes K and V of new tokens into their pages. Numbers of the model that a format keeps as they are move straight to
// their places; others become codes and scales first (kv_encode.h), a head of a token at a time.

#pragma once

#include <algorithm>
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
    const StorePages *pages;  // where to
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

// One worker's memory: a head's numbers, and what they become; and the same of LANES keys.
struct Row {
    float *x;
    void *numbers;
    float *lanes;  // [dims, LANES] or [LANES, dims]
    int32_t *codes;  // [dims, LANES]
    Int4Scale *scales;  // [groups, LANES]; of other formats only `scale`, and one group

    static int64_t bytes(int64_t dims) { return (dims * (8 + LANES * 12) + 63) / 64 * 64; }
    static Row in(uint8_t *memory, int64_t dims) {
        uint8_t *lanes = memory + dims * 8;
        return {reinterpret_cast<float *>(memory), memory + dims * 4, reinterpret_cast<float *>(lanes),
                reinterpret_cast<int32_t *>(lanes + dims * LANES * 4),
                reinterpret_cast<Int4Scale *>(lanes + dims * LANES * 8)};
    }
};

inline void widen(const float *from, int64_t dims, float *to) { memcpy(to, from, dims * sizeof(float)); }
inline void widen(const Bf16Bits *from, int64_t dims, float *__restrict to) {
    for (int64_t i = 0; i < dims; i++) to[i] = of_bits(static_cast<int32_t>(static_cast<uint32_t>(from[i]) << 16));
}

// What is done to a head's numbers before they become codes.
inline void shape(const StoreHalf &half, int64_t head, int64_t dims, float *x) {
    if (half.centre)
        for (int64_t i = 0; i < dims; i++) x[i] -= half.centre[head * dims + i];
    if (half.channels)
        for (int64_t i = 0; i < dims; i++) x[i] /= half.channels[head * dims + i];
    if (half.signs) rotate(x, half.signs, dims);
}

inline void put_int4(const Int4Scale &found, int64_t group, const Slot &slot, const StoreHalf &half) {
    put(found.scale, group, slot, half.scales);
    put(found.zero, group, slot, half.zeros);
}

template <bool IS_K>
void place_codes(const StoreHalf &half, int64_t head, int64_t dims, const Slot &slot, const uint8_t *codes) {
    uint8_t *to = slot.block + half.codes;
    if (static_cast<KvFormat>(half.format) == KvFormat::INT4)
        return place_int4<IS_K>(codes, dims, slot, to + head * dims / 2 * slot.block_size);
    place<IS_K, 1>(codes, dims, slot, to + head * dims * slot.block_size);
}

template <bool IS_K>
void store_quantised(const StorePages &pages, const StoreHalf &half, const Slot &slot, int64_t head, const Row &row) {
    const int64_t dims = pages.head_dim, groups = dims / INT4_GROUP;
    uint8_t *codes = static_cast<uint8_t *>(row.numbers);
    shape(half, head, dims, row.x);
    switch (static_cast<KvFormat>(half.format)) {
        case KvFormat::FP8_E4M3:
            if (half.scales < 0) encode_unscaled<e4m3_of>(row.x, dims, codes);
            else put(encode_scaled<e4m3_of>(row.x, dims, 448, codes), head, slot, half.scales);
            break;
        case KvFormat::INT8:
            if (half.scales < 0) encode_unscaled<int8_of>(row.x, dims, codes);
            else put(encode_scaled<int8_of>(row.x, dims, 127, codes), head, slot, half.scales);
            break;
        case KvFormat::INT4:
            for (int64_t group = 0; group < groups; group++) {
                const int64_t at = group * INT4_GROUP;
                put_int4(encode_int4(row.x + at, codes + at), head * groups + group, slot, half);
            }
            break;
        default:
            encode_unscaled<e5m2_of>(row.x, dims, codes);
    }
    place_codes<IS_K>(half, head, dims, slot, codes);
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

inline Slot slot_of(const StorePages &pages, int64_t slot) {
    const int64_t size = pages.block_size;
    return {pages.pool + slot / size * pages.block_bytes, slot % size, size};
}

// How keys that get feedback are encoded.
struct FedKeys {
    const StorePages &pages;
    const KvFormat format = static_cast<KvFormat>(pages.k.format);
    const int64_t dims = pages.head_dim, groups = format == KvFormat::INT4 ? dims / INT4_GROUP : 1;

    const float *shares(int64_t head) const { return pages.k.feedback + head * dims * dims; }

    // Keys' scales, which do not know of any feedback. x: [dims]
    void find_scales(const float *x, int lane, const Row &row) const {
        for (int64_t group = 0; group < groups; group++)
            row.scales[group * LANES + lane] =
                format == KvFormat::INT4 ? int4_scale_of(x + group * INT4_GROUP)
                                         : Int4Scale{scale_of_head(x, dims, format == KvFormat::INT8 ? 127 : 448), 0};
    }

    // Codes of `count` keys. Number of dim i of a key: x[i x dim_stride + lane x lane_stride]. hand_on(i, errors) is told
    // what dim i has lost.
    template <class HandOn>
    void encode(int count, const float *x, int64_t dim_stride, int64_t lane_stride, const Row &row,
                HandOn hand_on) const {
        const auto encode_as = [&](auto codes) {
            Grid grid;
            for (int64_t i = 0; i < dims; i++) {
                if (i % (dims / groups) == 0) set_grid(grid, count, row.scales + i / (dims / groups) * LANES);
                float errors[LANES];
                encode_lanes<decltype(codes)>(grid, x + i * dim_stride, lane_stride, row.codes + i * LANES, errors);
                hand_on(i, errors);
            }
        };
        if (format == KvFormat::INT4) encode_as(FedInt4());
        else if (format == KvFormat::INT8) encode_as(FedInt8());
        else encode_as(FedE4m3());
    }

    static void set_grid(Grid &grid, int count, const Int4Scale *scales) {
        for (int lane = 0; lane < LANES; lane++)
            lane < count ? grid.set(lane, scales[lane].scale, scales[lane].zero) : grid.set(lane, NAN_SCALE, 0);
    }

    // Puts the codes and scales of one key where they belong.
    void put_key(int64_t token_slot, int64_t head, int lane, const Row &row) const {
        if (token_slot < 0) return;
        const Slot slot = slot_of(pages, token_slot);
        uint8_t *codes = static_cast<uint8_t *>(row.numbers);
        for (int64_t i = 0; i < dims; i++) codes[i] = static_cast<uint8_t>(row.codes[i * LANES + lane]);
        place_codes<true>(pages.k, head, dims, slot, codes);
        for (int64_t group = 0; group < groups; group++) {
            const Int4Scale &own = row.scales[group * LANES + lane];
            if (format == KvFormat::INT4) put_int4(own, head * groups + group, slot, pages.k);
            else put(own.scale, head, slot, pages.k.scales);
        }
    }
};

// Keys of a head of up to LANES tokens from `first` on.
template <class Model>
void store_fed_head(const StorePages &pages, const StoreRows &rows, int64_t head, int64_t first, const Row &row) {
    const FedKeys keys{pages};
    const int64_t dims = pages.head_dim, left = rows.tokens - first;
    const int count = static_cast<int>(left < LANES ? left : LANES);
    const float *const shares = keys.shares(head);
    if (count < LANES) memset(row.lanes, 0, dims * LANES * sizeof(float));  // of tokens that are not there
    for (int lane = 0; lane < count; lane++) {
        widen(static_cast<const Model *>(rows.k) + (first + lane) * rows.k_stride + head * dims, dims, row.x);
        shape(pages.k, head, dims, row.x);
        for (int64_t i = 0; i < dims; i++) row.lanes[i * LANES + lane] = row.x[i];
        keys.find_scales(row.x, lane, row);
    }
    keys.encode(count, row.lanes, LANES, 1, row, [&](int64_t i, const float *errors) {
        hand_on(errors, shares + i * dims, i, dims, row.lanes);
    });
    for (int lane = 0; lane < count; lane++) keys.put_key(rows.slots[first + lane], head, lane, row);
}

// Keys of `count` <= LANES heads from `first` on, of the only token.
template <class Model>
void store_fed_token(const StorePages &pages, const StoreRows &rows, int64_t first, int count, const Row &row) {
    const FedKeys keys{pages};
    const int64_t dims = pages.head_dim;
    for (int lane = 0; lane < count; lane++) {
        float *const x = row.lanes + lane * dims;
        widen(static_cast<const Model *>(rows.k) + (first + lane) * dims, dims, x);
        shape(pages.k, first + lane, dims, x);
        keys.find_scales(x, lane, row);
    }
    keys.encode(count, row.lanes, 1, dims, row, [&](int64_t i, const float *errors) {
        for (int lane = 0; lane < count; lane++)
            hand_on(errors[lane], keys.shares(first + lane) + i * dims, i, dims, row.lanes + lane * dims);
    });
    for (int lane = 0; lane < count; lane++) keys.put_key(rows.slots[0], first + lane, lane, row);
}

// Keys with feedback, in units of a head and LANES tokens; a head's units follow each other: they share its feedback.
// Of a single token several heads lie side by side.
template <class Model>
void store_fed_units(const StorePages &pages, const StoreRows &rows, int64_t begin, int64_t end, const Row &row) {
    const int64_t batches = (rows.tokens + LANES - 1) / LANES;
    if (rows.tokens == 1)
        for (; begin < end; begin += LANES)
            store_fed_token<Model>(pages, rows, begin, static_cast<int>(std::min<int64_t>(end - begin, LANES)), row);
    for (; begin < end; begin++)
        store_fed_head<Model>(pages, rows, begin / batches, begin % batches * LANES, row);
}

template <class Model>
void store_tokens(const StorePages &pages, const StoreRows &rows, int64_t begin, int64_t end, const Row &row) {
    for (int64_t token = begin; token < end; token++) {
        if (rows.slots[token] < 0) continue;
        const Slot to = slot_of(pages, rows.slots[token]);
        if (!pages.k.feedback)
            store_heads<true>(pages, pages.k, to, static_cast<const Model *>(rows.k) + token * rows.k_stride, row);
        store_heads<false>(pages, pages.v, to, static_cast<const Model *>(rows.v) + token * rows.v_stride, row);
    }
}

// Returns 1 where there is no memory.
template <class Model>
int32_t store_kv(const StorePages &pages, const StoreRows &rows) {
    constexpr int64_t NUMBERS_PER_THREAD = 1 << 15;  // fewer are not worth waking a thread
    const int64_t dims = pages.head_dim, batches = (rows.tokens + LANES - 1) / LANES;
    const int64_t units = pages.k.feedback ? batches * pages.kv_heads : 0;
    const int64_t wanted = (rows.tokens * pages.kv_heads * dims + units * dims * dims) / NUMBERS_PER_THREAD + 1;
    const int threads = static_cast<int>(wanted < octavo_threads() ? wanted : octavo_threads());
    const int64_t row_bytes = Row::bytes(dims);
    uint8_t *memory = static_cast<uint8_t *>(malloc(threads * row_bytes));
    if (!memory) return 1;
    auto body = [&](int thread) {
        const Row row = Row::in(memory + thread * row_bytes, dims);
        store_fed_units<Model>(pages, rows, units * thread / threads, units * (thread + 1) / threads, row);
        store_tokens<Model>(pages, rows, rows.tokens * thread / threads, rows.tokens * (thread + 1) / threads, row);
    };
    on_threads(threads, body);
    free(memory);
    return 0;
}

}  // namespace

#define STORE_ENTRIES(ISA)                                                     \
    extern "C" int32_t octavo_store_kv_fp32_##ISA(const StoreRows *rows) {     \
        return store_kv<float>(*rows->pages, *rows);                           \
    }                                                                          \
    extern "C" int32_t octavo_store_kv_bf16_##ISA(const StoreRows *rows) {     \
        return store_kv<Bf16Bits>(*rows->pages, *rows);                        \
    }
