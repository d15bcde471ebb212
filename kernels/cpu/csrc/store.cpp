// Writes K and V of new tokens into their pages, and copies whole blocks. Bits move unchanged, so one version serves
// all instruction sets and, by the size of a number, all formats: 16 bits are stored in pairs, 32 bits one by one.

#include <cstdint>
#include <cstring>

#include "parallel.h"

// The arguments of octavo_store_kv. Strides in elements, offsets in bytes.
struct StoreCall {
    const void *k, *v;  // [tokens, kv_heads, head_dim], dense inside a row
    int64_t k_stride, v_stride;
    uint8_t *pool;  // [blocks, block_bytes]
    int64_t block_bytes, k_offset, v_offset, block_size, kv_heads, head_dim;
    const int64_t *slots;  // [tokens]; negative: skip
    int64_t tokens;
};

namespace {

// K [kv_heads, head_dim / PAIR, block_size, PAIR], V [kv_heads, block_size / PAIR, head_dim, PAIR].
template <class Number, int PAIR>
void store_token(const StoreCall &call, int64_t token) {
    const int64_t slot = call.slots[token];
    if (slot < 0) return;
    uint8_t *block = call.pool + slot / call.block_size * call.block_bytes;
    const int64_t offset = slot % call.block_size, dims = call.head_dim, head_numbers = dims * call.block_size;
    const Number *k = static_cast<const Number *>(call.k) + token * call.k_stride;
    const Number *v = static_cast<const Number *>(call.v) + token * call.v_stride;
    Number *k_to = reinterpret_cast<Number *>(block + call.k_offset) + offset * PAIR;
    Number *v_to = reinterpret_cast<Number *>(block + call.v_offset) + offset / PAIR * dims * PAIR + offset % PAIR;
    for (int64_t head = 0; head < call.kv_heads; head++) {
        for (int64_t d = 0; d < dims; d += PAIR) memcpy(k_to + d * call.block_size, k + d, sizeof(Number) * PAIR);
        for (int64_t d = 0; d < dims; d++) v_to[d * PAIR] = v[d];
        k += dims, v += dims, k_to += head_numbers, v_to += head_numbers;
    }
}

}  // namespace

extern "C" void octavo_store_kv(const StoreCall *call, int64_t itemsize) {
    constexpr int64_t NUMBERS_PER_THREAD = 1 << 15;  // fewer are not worth waking a thread
    const int64_t wanted = call->tokens * call->kv_heads * call->head_dim / NUMBERS_PER_THREAD + 1;
    const int threads = static_cast<int>(wanted < octavo_threads() ? wanted : octavo_threads());
    auto body = [&](int thread) {
        const int64_t end = call->tokens * (thread + 1) / threads;
        for (int64_t token = call->tokens * thread / threads; token < end; token++)
            itemsize == 2 ? store_token<uint16_t, 2>(*call, token) : store_token<uint32_t, 1>(*call, token);
    };
    on_threads(threads, body);
}

// pairs: [count, 2] block ids, source and destination, applied in order.
extern "C" void octavo_copy_blocks(uint8_t *pool, int64_t block_bytes, const int64_t *pairs, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        memmove(pool + pairs[2 * i + 1] * block_bytes, pool + pairs[2 * i] * block_bytes, block_bytes);
}
