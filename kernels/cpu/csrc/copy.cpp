#include <cstdint>
#include <cstring>

// pairs: [count, 2] block ids, source and destination, applied in order.
extern "C" void octavo_copy_blocks(uint8_t *pool, int64_t block_bytes, const int64_t *pairs, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        memmove(pool + pairs[2 * i + 1] * block_bytes, pool + pairs[2 * i] * block_bytes, block_bytes);
}
