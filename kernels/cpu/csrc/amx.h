// AMX tile instructions by register number. Own wrappers, as those of some compilers do not say that they read memory
// (a store before a tile load may then move behind it) and cannot take a template's number.

#pragma once

#include <cstdint>

namespace {

// What LDTILECFG reads (Intel SDM, volume 1, chapter 18): all eight tiles 16 rows of 64 bytes, if nothing is changed.
struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

inline void configure_tiles(const TileConfig &config = {}) {
    __asm__ volatile("ldtilecfg %0" : : "m"(config));
}
inline void release_tiles() { __asm__ volatile("tilerelease"); }

template <int T>
void zero_tile() {
    __asm__ volatile("tilezero %%tmm%c0" : : "i"(T));
}
// Rows are `stride` bytes apart.
template <int T>
void load_tile(const void *from, int64_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T>
void store_tile(void *to, int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(T) : "memory");
}
// C += A . B over pairs of bf16.
template <int C, int A, int B>
void dot_bf16_tiles() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

}  // namespace
