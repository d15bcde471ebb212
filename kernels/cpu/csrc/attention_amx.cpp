// The products of paged attention on AMX tiles (bf16). A page's K and V are B tiles as they lie: 16 rows of 16 pairs.
// Inside a tile of tokens a score sums steps of 32 dims; a value is one step over all 32 tokens, unseen ones weigh 0.

#include "amx.h"
#include "attention_batch.h"

namespace {

class AmxEngine {
    static constexpr int ROWS = 16, STEP = 32;  // of a tile register: rows, bf16 numbers in one
    enum { C0, C1, C2, C3, A0, A1, B0, B1 };  // tile registers

    const AttentionCall &call;
    const int64_t dims, width, units;  // of a row: dims rounded up to whole steps, to whole vectors; dim units
    const bool copies_k, copies_v;  // what lies in pages as it is multiplied, but not in whole vectors
    int tile_rows = 0;  // of the tiles that hold queries, weights, sums
    uint16_t *q;
    uint32_t *k_copy, *v_copy, *v_row_copy;
    float *products;

  public:
    using Format = Bf16;
    static constexpr int BLOCK = 16, SLACK = ROWS - 1;
    static constexpr bool ABREAST = false;

    static int64_t floats(const AttentionCall &call, int rows) {
        const int64_t dims = round_up(call.head_dim, STEP), width = round_up(call.head_dim, W);
        return Scratch::size<uint16_t>((rows + ROWS) * dims) + Scratch::size<uint32_t>(dims / 2 * TILE) +
               2 * Scratch::size<uint32_t>(TILE / 2 * width) + Scratch::size<float>(ROWS * width);
    }

    AmxEngine(const AttentionCall &call, Scratch scratch, int rows)
        : call(call),
          dims(round_up(call.head_dim, STEP)),
          width(round_up(call.head_dim, W)),
          units(call.head_dim / 2),
          copies_k(Decoder<Bf16>::in_place(call.k) && (call.block_size % W || dims != call.head_dim)),
          copies_v(Decoder<Bf16>::in_place(call.v) && width != call.head_dim),
          q(scratch.take<uint16_t>((rows + ROWS) * dims)),
          k_copy(scratch.take<uint32_t>(dims / 2 * TILE)),
          v_copy(scratch.take<uint32_t>(TILE / 2 * width)),
          v_row_copy(scratch.take<uint32_t>(TILE / 2 * width)),
          products(scratch.take<float>(ROWS * width)) {
        memset(q, 0, sizeof(uint16_t) * (rows + ROWS) * dims);
        memset(k_copy, 0, sizeof(uint32_t) * dims / 2 * TILE);
    }
    ~AmxEngine() { release_tiles(); }

    static int64_t score_parts(const AttentionCall &call) { return round_up(call.head_dim, STEP) / STEP; }
    static int64_t add_parts(const AttentionCall &) { return 1; }

    void gather_q(const Panel &panel, const ModelRows<Bf16> &rows) {
        if (tile_rows != least(panel.rows, ROWS)) {
            tile_rows = least(panel.rows, ROWS);
            TileConfig config;
            for (int tile = C0; tile <= A1; tile++) config.rows[tile] = static_cast<uint8_t>(tile_rows);
            configure_tiles(config);
        }
        for (int row = 0; row < panel.all_rows(); row++)
            memcpy(q + row * dims, rows.query(panel, row), sizeof(uint16_t) * call.head_dim);
    }

    // K is copied also where dims are no whole steps. V is copied where the tile crosses blocks, and where it holds
    // tokens that nobody of the panel sees: those become 0.
    void prepare(const Pages<Bf16> &pages, int head, int64_t start, Tile<Bf16> &tile) {
        const Panel &panel = pages.panel;
        const int begin = panel.in_tile(panel.all_begin(), start), end = panel.in_tile(panel.all_end(), start);
        if (copies_k) {
            pages.gather(call.k.codes + (panel.kv_head + head) * pages.k.head, start, units, k_copy);
            for (int g = 0; g < GROUPS; g++) tile.k[g] = k_copy + g * W;
            tile.k_stride = TILE;
        }
        if (end - begin < TILE || copies_v || !evenly_spaced(tile)) copy_v(begin, end, v_copy, tile);
    }

    void score(const Panel &panel, int head, int first, int last, const Tile<Bf16> &tile, Ahead<Bf16> &ahead,
               float *to) const {
        for (int r = first; r < last; r += ROWS) {
            zero_tile<C0>();
            zero_tile<C1>();
            zero_tile<C2>();
            zero_tile<C3>();
            for (int64_t d = 0; d < dims; d += STEP) {
                load_tile<A0>(q + (head * panel.rows + r) * dims + d, dims * 2);
                multiply_k<C0, B0>(tile, 0, d);
                multiply_k<C1, B1>(tile, 1, d);
                multiply_k<C2, B0>(tile, 2, d);
                multiply_k<C3, B1>(tile, 3, d);
                ahead.score();
            }
            store_tile<C0>(to + r * TILE, TILE * 4);
            store_tile<C1>(to + r * TILE + W, TILE * 4);
            store_tile<C2>(to + r * TILE + 2 * W, TILE * 4);
            store_tile<C3>(to + r * TILE + 3 * W, TILE * 4);
        }
    }

    void add(const Panel &panel, int64_t start, int first, int last, const Tile<Bf16> &tile, Ahead<Bf16> &ahead,
             const uint32_t *weights, const float *rescale, float *values) {
        ahead.add();
        if (panel.all_see_tile(start) ||
            all_finite(tile, panel.begin_in_tile(last - 1, start), panel.end_in_tile(first, start))) {
            add_rows(tile, first, last, weights, rescale, values);
            return;
        }
        // 0 x inf would reach rows that do not see it: row by row, each without the unseen.
        for (int r = first; r < last; r++) {
            Tile<Bf16> mine = tile;
            copy_v(panel.begin_in_tile(r, start), panel.end_in_tile(r, start), v_row_copy, mine);
            add_rows(mine, r, r + 1, weights, rescale, values);
        }
    }

  private:
    // C += queries (in tile A0) . K of W tokens
    template <int C, int B>
    static void multiply_k(const Tile<Bf16> &tile, int g, int64_t d) {
        load_tile<B>(tile.k[g] + d / 2 * tile.k_stride, tile.k_stride * 4);
        dot_bf16_tiles<C, A0, B>();
    }

    // products[ROWS][d ...] = weights (in tiles A0 and A1) . V
    template <int C>
    void multiply_v(const uint32_t *const (&v)[2], int64_t stride, int64_t d) const {
        zero_tile<C>();
        load_tile<B0>(v[0] + d, stride * 4);
        dot_bf16_tiles<C, A0, B0>();
        load_tile<B1>(v[1] + d, stride * 4);
        dot_bf16_tiles<C, A1, B1>();
        store_tile<C>(products + d, width * 4);
    }

    void add_rows(const Tile<Bf16> &tile, int first, int last, const uint32_t *weights, const float *rescale,
                  float *values) const {
        const uint32_t *const v[2] = {tile.v[0], tile.v[STEP / 2]};
        const int64_t stride = tile.v[1] - tile.v[0], row = width;
        for (int begin = first; begin < last; begin += ROWS) {
            load_tile<A0>(weights + begin * TILE / 2, TILE * 2);
            load_tile<A1>(weights + begin * TILE / 2 + STEP / 2, TILE * 2);
            int64_t d = 0;
            for (; d + 4 * W <= row; d += 4 * W) {
                multiply_v<C0>(v, stride, d);
                multiply_v<C1>(v, stride, d + W);
                multiply_v<C2>(v, stride, d + 2 * W);
                multiply_v<C3>(v, stride, d + 3 * W);
            }
            for (; d < row; d += W) multiply_v<C0>(v, stride, d);
            const float *product = products;
            for (int r = begin; r < least(begin + ROWS, last); r++) {
                const Vec factor = splat(rescale[r]);
                for (float *value = values + r * row; value < values + (r + 1) * row; value += W, product += W)
                    store(value, fma(load(value), factor, load(product)));
            }
        }
    }

    // Inside each step, and both alike.
    static bool evenly_spaced(const Tile<Bf16> &tile) {
        constexpr int last = STEP / 2 - 1;
        const int64_t stride = tile.v[1] - tile.v[0];
        return tile.v[last] - tile.v[0] == stride * last &&
               tile.v[last + 1 + last] - tile.v[last + 1] == stride * last;
    }

    // V of the tokens [begin, end) in one run at `to`; the others are 0.
    void copy_v(int begin, int end, uint32_t *to, Tile<Bf16> &tile) const {
        const int64_t dims = call.head_dim;
        const __mmask16 last_dims = static_cast<__mmask16>((1u << dims % W) - 1);
        for (int t = 0; t < Tile<Bf16>::V_ROWS; t++, to += width) {
            const uint32_t *from = tile.v[t];
            const __m512i seen = _mm512_set1_epi32((2 * t >= begin && 2 * t < end ? 0xffff : 0) |
                                                   (2 * t + 1 >= begin && 2 * t + 1 < end ? 0xffff0000 : 0));
            int64_t d = 0;
            for (; d + W <= dims; d += W)
                _mm512_storeu_si512(to + d, _mm512_and_si512(_mm512_loadu_si512(from + d), seen));
            if (d < dims)
                _mm512_storeu_si512(to + d, _mm512_and_si512(_mm512_maskz_loadu_epi32(last_dims, from + d), seen));
            tile.v[t] = to;
        }
    }

    // Whether V holds neither infinities nor NaN but perhaps in pairs of two of the tokens [begin, end).
    bool all_finite(const Tile<Bf16> &tile, int begin, int end) const {
        const __m512i exponent = _mm512_set1_epi16(0x7f80);
        __mmask32 bad = 0;
        for (int t = 0; t < Tile<Bf16>::V_ROWS; t++) {
            if (2 * t >= begin && 2 * t + 2 <= end) continue;
            for (int64_t d = 0; d < width; d += W)
                bad |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(_mm512_loadu_si512(tile.v[t] + d), exponent), exponent);
        }
        return !bad;
    }
};

}  // namespace

extern "C" int32_t octavo_attention_bf16_amx(const AttentionCall *call) { return paged_attention<AmxEngine>(*call); }
