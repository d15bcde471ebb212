// Weights of linear layers in codes, from which units (formats.h) are made as they are needed.
//
// In int8, with a scale for each column: [blocks of 32 columns][dims][32 columns] bytes. A unit holds whole numbers,
// which is exact; sums are multiplied by the scale, in fp32, before the bias is added.
//
// In groups, as GGUF files store weights: a number is scale x code + minimum in fp32, rounded once to what is
// multiplied, so that it has the bits of the weight that is unpacked at load. [blocks][groups of dims]: 32 scales, 32
// minimums where there are any, then codes. Those of 8 bits are [dims][32 columns]; those of 4 bits [pairs of dims][32
// columns], the first dim in the lower half of a byte.
//
// That is the order for units of which the first numbers are made as a vector of W columns, and then the second ones.
// With AVX-512 bf16 the numbers of eight columns, two each, are made as a vector, and then those of eight more, since
// such vectors become units in one instruction. Codes are in that order then: "in pairs".

#pragma once

#include <type_traits>

#include "linear.h"

namespace {

enum class Codes { INT8, GROUPS_OF_4_BITS, GROUPS_OF_8_BITS };

// run(integral_constant of Codes).
template <class Run>
void with_codes(const LinearWeight &w, Run run) {
    if (!w.group) run(std::integral_constant<Codes, Codes::INT8>{});
    else if (w.bits == 4) run(std::integral_constant<Codes, Codes::GROUPS_OF_4_BITS>{});
    else run(std::integral_constant<Codes, Codes::GROUPS_OF_8_BITS>{});
}

inline int64_t head_bytes(const LinearWeight &w) { return BLOCK * w.scale_bytes * (1 + w.minimums); }
inline int64_t group_bytes(const LinearWeight &w) { return head_bytes(w) + w.group * w.bits / 8 * BLOCK; }

// Of a block.
template <class F>
int64_t code_bytes(const LinearWeight &w) {
    return w.group ? w.k / w.group * group_bytes(w) : w.depth * F::PAIR * BLOCK;
}

#if defined(__AVX512BF16__)
template <class F>
constexpr bool PAIRED = F::PAIR == 2;

inline Units units_of_pairs(const Vec (&v)[2]) { return (Units)_mm512_cvtne2ps_pbh(v[1], v[0]); }
// One number a column -> the lanes of vectors in pairs.
inline void give_lanes(Vec v, Vec (&to)[2]) {
    const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    to[0] = _mm512_permutexvar_ps(twice, v);
    to[1] = _mm512_permutexvar_ps(_mm512_add_epi32(twice, _mm512_set1_epi32(8)), v);
}
#else
template <class F>
constexpr bool PAIRED = false;
#endif
inline void give_lanes(Vec v, Vec (&to)[1]) { to[0] = v; }

// The lowest four bits of each lane; none of the others is set, or there are 16 lanes.
inline Vec from_int4(Units codes) {
#if defined(__AVX512F__)
    const Vec values = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_permutexvar_ps(codes, values);
#else
    return to_floats(codes);
#endif
}

// Hands out units of N x W columns, from those of the first dims of `codes` on, group after group, block after block.
template <class F, Codes CODES, int N>
class CodeStream {
    static constexpr bool GROUPS = CODES != Codes::INT8;
    static constexpr bool IN_PAIRS = GROUPS && PAIRED<F>;
    static constexpr int PARTS = IN_PAIRS ? 2 : 1;  // vectors of scales for W columns
    static constexpr int64_t AHEAD = 8192;          // bytes that codes are fetched in advance

    const LinearWeight &w;
    const uint8_t *from;  // codes of the next dims
    const int64_t column;
    int64_t left = 0;  // dims of the group
    Vec scale[N][PARTS], minimum[N][PARTS];

    Vec numbers(int64_t vector, const uint8_t *at) const {
        return w.scale_bytes == 2 ? from_fp16(reinterpret_cast<const uint16_t *>(at) + column + vector * W)
                                  : load(reinterpret_cast<const float *>(at) + column + vector * W);
    }
    void begin_group() {
        const Vec lowest = splat(static_cast<float>(w.lowest));
        const uint8_t *head = from - column;
        for (int j = 0; j < N; j++) {
            const Vec scales = numbers(j, head);
            give_lanes(scales, scale[j]);
            give_lanes(w.minimums ? numbers(j, head + BLOCK * w.scale_bytes) : mul(lowest, scales), minimum[j]);
        }
        from += head_bytes(w);
        left = w.group;
    }
    // What the codes of W columns at `at` stand for.
    void read(const uint8_t *at, Vec (&to)[F::PAIR]) const {
        if constexpr (CODES == Codes::GROUPS_OF_4_BITS) {
            const Units bytes = widen_bytes(at), upper = shift_down_4(bytes);
            const Units lower = W == 16 ? bytes : and_units(bytes, splat_unit(15));
            if constexpr (F::PAIR == 2) to[0] = from_int4(lower), to[1] = from_int4(upper);
            else to[0] = from_int4(left % 2 ? upper : lower);
        } else {
            for (int i = 0; i < F::PAIR; i++) to[i] = from_int8(at + i * BLOCK);
        }
    }

  public:
    CodeStream(const LinearWeight &w, const uint8_t *codes, int64_t column)
        : w(w), from(codes + column), column(column) {}

    void next(Units (&to)[N]) {
        if (GROUPS && !left) begin_group();
        prefetch(from + AHEAD);
        for (int j = 0; j < N; j++) {
            Vec numbers[F::PAIR];
            read(from + j * W, numbers);
            if constexpr (GROUPS) {
                for (int i = 0; i < F::PAIR; i++)
                    numbers[i] = fma(numbers[i], scale[j][i % PARTS], minimum[j][i % PARTS]);
                if constexpr (IN_PAIRS) to[j] = units_of_pairs(numbers);
                else to[j] = F::rounded(numbers);
            } else {
                to[j] = F::exact(numbers);
            }
        }
        if constexpr (GROUPS) left -= F::PAIR;
        if constexpr (CODES == Codes::GROUPS_OF_4_BITS) from += F::PAIR == 2 || left % 2 == 0 ? BLOCK : 0;
        else from += F::PAIR * BLOCK;
    }
};

}  // namespace
