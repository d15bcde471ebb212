// Tiles of K and V as an engine multiplies them: where they lie if their format is the engine's, else expanded, once
// for each tile and key/value head, into scratch memory that stays in the smallest cache.
//
//     bf16, fp16   widened (fp32 engine)
//     fp8, int8    codes as numbers, exact in both engines' formats; a token's scale is left to its score or weight
//     int4         code x scale + zero in fp32, rounded to the engine's format

#pragma once

#include "attention_ahead.h"
#include "fp8_decode.h"

namespace {

// Numbers that lie one by one, those of a unit `stride` codes apart.
template <class Numbers, class CodeType>
struct Singles {
    using Code = CodeType;
    template <class F>
    static Units units(const Code *from, int64_t stride) {
        Vec numbers[F::PAIR];
        for (int i = 0; i < F::PAIR; i++) numbers[i] = Numbers::load_numbers(from + i * stride);
        return F::exact(numbers);
    }
};
struct Int8Numbers : Singles<Int8Numbers, uint8_t> {
    static Vec load_numbers(const Code *p) { return from_int8(p); }
};
struct Fp16Numbers : Singles<Fp16Numbers, uint16_t> {
    static Vec load_numbers(const Code *p) { return from_fp16(p); }
};

// Numbers that lie in pairs.
struct Bf16Pairs {
    static void split(Units pairs, Vec (&v)[2]) {
        v[0] = as_floats(shift_up_16(pairs)), v[1] = as_floats(and_units(pairs, splat_unit(0xffff0000)));
    }
};
struct Fp16Pairs {
    static void split(Units pairs, Vec (&v)[2]) {
        uint32_t units[W];
        uint16_t numbers[2][W];
        store_units(units, pairs);
        for (int i = 0; i < W; i++) {
            numbers[0][i] = static_cast<uint16_t>(units[i]);
            numbers[1][i] = static_cast<uint16_t>(units[i] >> 16);
        }
        v[0] = from_fp16(numbers[0]), v[1] = from_fp16(numbers[1]);
    }
};

// Expansions are functions of their own: inlined into the walk over tiles they would lack registers.
#define NOT_INLINED __attribute__((noinline))

template <class F>
class Decoder {
    static constexpr int PAIR = F::PAIR, V_ROWS = Tile<F>::V_ROWS;
    static constexpr bool STRAIGHT = HAS_FP8_PAIRS && PAIR == 2;  // from fp8 to the engine's numbers
    static constexpr int K_PART = 16, V_PART = 4;  // rows of K, units of V that are expanded in a row

    // K of a tile: of each W tokens the first one, rows of dims or pairs of dims `stride` bytes apart; `run` tokens lie
    // side by side.
    struct KRows {
        const uint8_t *at[GROUPS];
        int64_t stride, run;
    };
    // V of a tile: the first token of each unit, the next one's `stride` bytes on.
    struct VRows {
        const uint8_t *at[V_ROWS];
        int64_t stride;
    };
    // A head of a tile.
    struct Place {
        const Pages<F> &pages;
        const Stored<F> &at;
        int head;
        int64_t start;
        Ahead<F> &ahead;
    };
    // Scales that belong to tokens, [TILE], and scales and zero points of groups of dims, [groups, TILE].
    struct Scales {
        float *tokens, *groups, *zeros;
    };

    const AttentionCall &call;
    const int64_t dims, width;  // of a row: dims; rounded up to whole vectors
    uint32_t *k_units = nullptr, *v_units = nullptr;  // [dim units, TILE], [V_ROWS, width]
    uint16_t *fp16 = nullptr;  // room for a tile
    uint8_t *gathered = nullptr;  // room for a tile of up to four bytes
    Scales k{}, v{};

  public:
    const bool k_in_place = in_place(call.k), v_in_place = in_place(call.v);
    const bool scales_tokens = leaves_scales(call.k) || leaves_scales(call.v);

    static int64_t floats(const AttentionCall &call) {
        if (in_place(call.k) && in_place(call.v)) return 0;
        return 3 * Scratch::size<uint32_t>(room(call)) + Scratch::size<uint16_t>(room(call)) +
               2 * (Scratch::size<float>(TILE) + 2 * Scratch::size<float>(groups(call) * TILE));
    }

    Decoder(const AttentionCall &call, Scratch scratch)
        : call(call), dims(call.head_dim), width(round_up(call.head_dim, W)) {
        if (k_in_place && v_in_place) return;
        k_units = scratch.take<uint32_t>(room(call));
        v_units = scratch.take<uint32_t>(room(call));
        fp16 = scratch.take<uint16_t>(room(call));
        gathered = scratch.take<uint8_t>(room(call) * sizeof(uint32_t));
        Scales *const both[] = {&k, &v};
        for (Scales *scales : both) {
            scales->tokens = scratch.take<float>(TILE);
            scales->groups = scratch.take<float>(groups(call) * TILE);
            scales->zeros = scratch.take<float>(groups(call) * TILE);
        }
        memset(k_units, 0, sizeof(uint32_t) * room(call));  // what dims that are not there leave
        memset(v_units, 0, sizeof(uint32_t) * room(call));
        for (int t = 0; t < TILE; t++) k.tokens[t] = unit_of(call.k), v.tokens[t] = unit_of(call.v);
    }

    // Of the tokens of the last tile, where `scales_tokens`.
    const float *k_scales() const { return k.tokens; }
    const float *v_scales() const { return v.tokens; }

    // A tile's head. What is expanded is whole vectors, K of [dims rounded up to 32, TILE], V of [TILE, width], with 0
    // where there are no dims; what is in place lies as it lies.
    Tile<F> tile(const Pages<F> &pages, const Stored<F> &at, int head, int64_t start, Ahead<F> &ahead) {
        Tile<F> tile = tile_in_place(pages, at, head);
        const Place place{pages, at, head, start, ahead};
        if (!k_in_place) {
            expand_k(k_rows(place), place);
            for (int g = 0; g < GROUPS; g++) tile.k[g] = k_units + g * W;
            tile.k_stride = TILE;
        }
        if (!v_in_place) {
            expand_v(v_rows(place), place);
            for (int t = 0; t < V_ROWS; t++) tile.v[t] = v_units + t * width;
        }
        return tile;
    }

    // In how many parts K and V are expanded.
    static int64_t k_parts(const AttentionCall &call) {
        const bool one_by_one = PAIR == 1 && (call.k.format == KvFormat::INT8 || is_fp8(call.k));
        return ceil_div(one_by_one ? call.head_dim : call.head_dim / 2, K_PART) * GROUPS;
    }
    static int64_t v_parts() { return V_ROWS / V_PART; }

    static bool in_place(const AttentionHalf &half) { return half.format == F::STORED; }

  private:
    static int64_t room(const AttentionCall &call) { return TILE * round_up(call.head_dim, 32); }
    static int64_t groups(const AttentionCall &call) { return ceil_div(call.head_dim, INT4_GROUP); }
    static bool is_e4m3(const AttentionHalf &half) { return half.format == KvFormat::FP8_E4M3; }
    static bool is_fp8(const AttentionHalf &half) { return is_e4m3(half) || half.format == KvFormat::FP8_E5M2; }
    static bool has_token_scales(const AttentionHalf &half) {
        return (is_e4m3(half) || half.format == KvFormat::INT8) && half.scales >= 0;
    }
    // Whether there is something left to multiply scores or weights by.
    static bool leaves_scales(const AttentionHalf &half) { return has_token_scales(half) || unit_of(half) != 1; }
    static float unit_of(const AttentionHalf &half) { return is_e4m3(half) && !STRAIGHT ? E4M3_OVER_FP16 : 1; }

    Tile<F> tile_in_place(const Pages<F> &pages, const Stored<F> &at, int head) const {
        Tile<F> tile;
        for (int g = 0; g < GROUPS; g++)
            tile.k[g] = reinterpret_cast<const uint32_t *>(at.k[g] + head * pages.k.head);
        for (int t = 0; t < V_ROWS; t++)
            tile.v[t] = reinterpret_cast<const uint32_t *>(at.v[t] + head * pages.v.head);
        tile.k_stride = call.block_size;
        return tile;
    }

    KRows k_rows(const Place &place) const {
        const Pages<F> &pages = place.pages;
        KRows rows;
        rows.stride = pages.k.k_row;
        rows.run = run_of(call.block_size);
        for (int g = 0; g < GROUPS; g++) rows.at[g] = place.at.k[g] + place.head * pages.k.head;
        if (rows.run % W == 0) return rows;
        const int64_t size = pages.k.k_token, from = call.k.codes + (pages.panel.kv_head + place.head) * pages.k.head;
        const int64_t count = pages.k.rows;
        if (size == 1)
            pages.gather(from, place.start, count, gathered);
        else
            pages.gather(from, place.start, count, reinterpret_cast<uint32_t *>(gathered));
        for (int g = 0; g < GROUPS; g++) rows.at[g] = gathered + g * W * size;
        rows.stride = TILE * size;
        rows.run = TILE;
        return rows;
    }

    VRows v_rows(const Place &place) const {
        const HalfLayout &layout = place.pages.v;
        VRows rows;
        rows.stride = layout.v_row;
        for (int t = 0; t < V_ROWS; t++) rows.at[t] = place.at.v[t] + place.head * layout.head;
        if (dims == width) return rows;
        const int64_t stored = rows.stride, whole = stored / dims * width;
        const int units = stored > dims ? 1 : PAIR;  // rows of one unit: one of pairs
        uint8_t *to = gathered;
        for (int t = 0; t < V_ROWS; t++) {
            for (int i = 0; i < units; i++) memcpy(to + i * whole, rows.at[t] + i * stored, stored);
            rows.at[t] = to;
            to += units * whole;
        }
        rows.stride = whole;
        return rows;
    }

    NOT_INLINED void expand_k(const KRows &rows, const Place &place) {
        read_scales(place, call.k, place.pages.k, k);
        switch (call.k.format) {
            case KvFormat::FP32:
                break;  // the fp32 engine's own
            case KvFormat::BF16:
                return split_k<Bf16Pairs>(rows, place.ahead);
            case KvFormat::FP16:
                return split_k<Fp16Pairs>(rows, place.ahead);
            case KvFormat::FP8_E4M3:
                if (!has_token_scales(call.k)) return fp8_k<StaticE4m3>(rows, place.ahead);
                return fp8_k<E4m3>(rows, place.ahead);
            case KvFormat::FP8_E5M2:
                return fp8_k<E5m2>(rows, place.ahead);
            case KvFormat::INT8:
                return numbers_k<Int8Numbers>(rows.at, rows.stride, place.ahead);
            case KvFormat::INT4:
                return int4_k(rows, place.ahead);
        }
    }

    NOT_INLINED void expand_v(const VRows &rows, const Place &place) {
        read_scales(place, call.v, place.pages.v, v);
        switch (call.v.format) {
            case KvFormat::FP32:
                break;
            case KvFormat::BF16:
                return split_v<Bf16Pairs>(rows, place.ahead);
            case KvFormat::FP16:
                return split_v<Fp16Pairs>(rows, place.ahead);
            case KvFormat::FP8_E4M3:
                if (!has_token_scales(call.v)) return fp8_v<StaticE4m3>(rows, place.ahead);
                return fp8_v<E4m3>(rows, place.ahead);
            case KvFormat::FP8_E5M2:
                return fp8_v<E5m2>(rows, place.ahead);
            case KvFormat::INT8:
                return each_v(place.ahead, [&](int t) { numbers_v<Int8Numbers>(rows.at[t], rows.stride, t); });
            case KvFormat::INT4:
                return int4_v(rows, place.ahead);
        }
    }

    void read_scales(const Place &place, const AttentionHalf &half, const HalfLayout &layout, const Scales &to) const {
        if (has_token_scales(half)) read_scales(place, half.scales, 1, unit_of(half), to.tokens);
        if (half.format != KvFormat::INT4) return;
        read_scales(place, half.scales, layout.groups, 1, to.groups);
        read_scales(place, half.zeros, layout.groups, 1, to.zeros);
    }

    // What lies in each block from `offset` on as fp16 [heads, groups, block size], to [groups, TILE], times `unit`.
    void read_scales(const Place &place, int64_t offset, int64_t groups, float unit, float *to) const {
        const int64_t row = call.block_size * sizeof(uint16_t);
        const int64_t from = offset + (place.pages.panel.kv_head + place.head) * groups * row;
        const bool whole = call.block_size % W == 0;
        if (!whole) place.pages.gather(from, place.start, groups, fp16);
        for (int64_t group = 0; group < groups; group++)
            for (int g = 0; g < GROUPS; g++) {
                const uint8_t *stored = place.at.scales[g] + from + group * row;
                const uint16_t *gathered = fp16 + group * TILE + g * W;
                const Vec scales = from_fp16(whole ? reinterpret_cast<const uint16_t *>(stored) : gathered);
                store(to + group * TILE + g * W, mul(scales, splat(unit)));
            }
    }

    // expand(g, row, end) for all of `rows` rows of K of each W tokens, with prefetches in between.
    template <class Expand>
    static void each_k(int64_t rows, Ahead<F> &ahead, Expand expand) {
        for (int g = 0; g < GROUPS; g++)
            for (int64_t row = 0; row < rows; row += K_PART) {
                expand(g, row, least(row + K_PART, rows));
                ahead.expand_k();
            }
    }

    // expand(t) for each unit of tokens of V.
    template <class Expand>
    static void each_v(Ahead<F> &ahead, Expand expand) {
        for (int t = 0; t < V_ROWS; t++) {
            expand(t);
            if ((t + 1) % V_PART == 0) ahead.expand_v();
        }
    }

    // K from numbers that lie one by one, `stride` codes from one dim to the next.
    template <class Numbers>
    NOT_INLINED void numbers_k(const typename Numbers::Code *const (&k)[GROUPS], int64_t stride,
                               Ahead<F> &ahead) {
        each_k(dims / PAIR, ahead, [&, stride](int g, int64_t row, int64_t end) {
            const typename Numbers::Code *from = k[g] + row * PAIR * stride;
            uint32_t *to = k_units + row * TILE + g * W;
            for (; row < end; row++, to += TILE, from += PAIR * stride)
                store_units(to, Numbers::template units<F>(from, stride));
        });
    }

    // V of token unit t from numbers that lie one by one, `stride` codes from one token to the next.
    template <class Numbers>
    void numbers_v(const typename Numbers::Code *v, int64_t stride, int t) {
        uint32_t *to = v_units + t * width, *const end = to + width;
        for (; to < end; to += W, v += W) store_units(to, Numbers::template units<F>(v, stride));
    }

    // In two steps: bytes to fp16 in registers as long as there are, then from memory, which widens at no cost.
    template <class Codes>
    NOT_INLINED void fp8_k(const KRows &rows, Ahead<F> &ahead) {
        if constexpr (STRAIGHT) return numbers_k<Codes>(rows.at, rows.stride, ahead);
        const uint16_t *k[GROUPS];
        uint16_t *to = fp16;
        for (int64_t t = 0; t < TILE; t += rows.run) {
            const uint8_t *from = rows.at[t / W];
            for (int64_t g = t / W; g < (t + rows.run) / W; g++) k[g] = to + g * W - t;
            if (rows.stride == rows.run)
                convert_run<Codes>(from, dims * rows.run, to);
            else
                for (int64_t d = 0; d < dims; d++)
                    convert_run<Codes>(from + d * rows.stride, rows.run, to + d * rows.run);
            to += dims * rows.run;
        }
        numbers_k<Fp16Numbers>(k, rows.run, ahead);
    }

    template <class Codes>
    NOT_INLINED void fp8_v(const VRows &rows, Ahead<F> &ahead) {
        if constexpr (STRAIGHT)
            return each_v(ahead, [&](int t) { numbers_v<Codes>(rows.at[t], rows.stride, t); });
        for (int t = 0; t < V_ROWS; t++) convert_run<Codes>(rows.at[t], width * PAIR, fp16 + t * width * PAIR);
        each_v(ahead, [&](int t) { numbers_v<Fp16Numbers>(fp16 + t * width * PAIR, width, t); });
    }

    template <class Codes>
    static void convert_run(const uint8_t *from, int64_t n, uint16_t *to) {
        constexpr int64_t LENGTH = 64;
        int64_t i = 0;
        for (; i + LENGTH <= n; i += LENGTH) Codes::to_fp16(from + i, LENGTH, to + i);
        Codes::to_fp16(from + i, n - i, to + i);
    }

    template <class Pairs>
    NOT_INLINED void split_k(const KRows &rows, Ahead<F> &ahead) {
        each_k(dims / 2, ahead, [&](int g, int64_t row, int64_t end) {
            for (; row < end; row++) {
                Vec numbers[2];
                Pairs::split(load_units(reinterpret_cast<const uint32_t *>(rows.at[g] + row * rows.stride)), numbers);
                for (int i = 0; i < 2; i++) store_units(k_units + (row * 2 + i) * TILE + g * W, as_units(numbers[i]));
            }
        });
    }

    template <class Pairs>
    NOT_INLINED void split_v(const VRows &rows, Ahead<F> &ahead) {
        each_v(ahead, [&](int t) {
            if (t % 2) return;
            for (int64_t d = 0; d < width; d += W) {
                Vec numbers[2];
                Pairs::split(load_units(reinterpret_cast<const uint32_t *>(rows.at[t]) + d), numbers);
                for (int i = 0; i < 2; i++) store_units(v_units + (t + i) * width + d, as_units(numbers[i]));
            }
        });
    }

    // Two dims in a byte, the first one low.
    NOT_INLINED void int4_k(const KRows &rows, Ahead<F> &ahead) {
        static_assert(INT4_GROUP / 2 % K_PART == 0, "a part has one scale");
        each_k(dims / 2, ahead, [&](int g, int64_t row, int64_t) {
            const int64_t group = row * 2 / INT4_GROUP * TILE + g * W, stride = rows.stride;
            const Vec scale = load(k.groups + group), zero = load(k.zeros + group);
            const uint8_t *from = rows.at[g] + row * stride;
            uint32_t *to = k_units + row * (2 / PAIR) * TILE + g * W;
            for (int i = 0; i < K_PART; i++, from += stride) {
                const Units codes = widen_bytes(from);
                const Vec numbers[2] = {fma(to_floats(and_units(codes, splat_unit(15))), scale, zero),
                                        fma(to_floats(shift_down_4(codes)), scale, zero)};
                for (int j = 0; j < 2; j += PAIR, to += TILE) {
                    Vec unit[PAIR];
                    for (int n = 0; n < PAIR; n++) unit[n] = numbers[j + n];
                    store_units(to, F::rounded(unit));
                }
            }
        });
    }

    // Of 32 dims the first sixteen are low, the others high in sixteen bytes.
    NOT_INLINED void int4_v(const VRows &rows, Ahead<F> &ahead) {
        each_v(ahead, [&](int t) {
            const uint8_t *codes = rows.at[t];
            const float *scales = v.groups + t * PAIR, *zeros = v.zeros + t * PAIR;
            uint32_t *to = v_units + t * width, *const end = to + dims;
            for (; to < end; to += INT4_GROUP, codes += INT4_GROUP / 2, scales += TILE, zeros += TILE)
                int4_group(codes, rows.stride, scales, zeros, to);
        });
    }

    // 32 dims of a token unit; scales and zero points one a token.
    __attribute__((always_inline)) static void int4_group(const uint8_t *codes, int64_t stride, const float *scales,
                                                          const float *zeros, uint32_t *to) {
#if defined(__AVX512F__)
        // All numbers that there can be, and one picked for each code.
        const Vec all = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        Vec numbers[PAIR];
        Units low[PAIR], high[PAIR];
        for (int i = 0; i < PAIR; i++) {
            numbers[i] = fma(all, splat(scales[i]), splat(zeros[i]));
            low[i] = widen_bytes(codes + i * stride);
            high[i] = shift_down_4(low[i]);
        }
        const Units table = F::rounded(numbers);
        store_units(to, F::looked_up(table, low));
        store_units(to + W, F::looked_up(table, high));
#else
        for (int j = 0; j < INT4_GROUP / 2; j += W) {
            Vec low[PAIR], high[PAIR];
            for (int i = 0; i < PAIR; i++) {
                const Units bytes = widen_bytes(codes + i * stride + j);
                low[i] = fma(to_floats(and_units(bytes, splat_unit(15))), splat(scales[i]), splat(zeros[i]));
                high[i] = fma(to_floats(shift_down_4(bytes)), splat(scales[i]), splat(zeros[i]));
            }
            store_units(to + j, F::rounded(low));
            store_units(to + INT4_GROUP / 2 + j, F::rounded(high));
        }
#endif
    }
};

#undef NOT_INLINED

}  // namespace
