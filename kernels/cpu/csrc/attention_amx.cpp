// The products of paged attention on AMX tiles (bf16). A page's K and V are B tiles as they lie: 16 rows of 16 pairs.
// Inside a tile of tokens a score sums steps of 32 dims; a value is one step over all 32 tokens, unseen ones weigh 0.

#include "amx.h"
#include "attention_batch.h"

namespace {

class AmxEngine {
    static constexpr int ROWS = 16, STEP = 32;  // of a tile register: rows, bf16 numbers in one
    enum { C0, C1, C2, C3, A, B0, B1 };  // tile registers

    const AttentionCall &call;
    const int64_t dims, width, units;  // of a row: dims rounded up to whole steps, to whole vectors; dim units
    const bool k_in_place;
    uint16_t *q;
    uint32_t *k_copy, *v_copy;
    float *products;

  public:
    using Format = Bf16;
    static constexpr int BLOCK = 16;

    static int64_t floats(const AttentionCall &call, int rows) {
        const int64_t dims = round_up(call.head_dim, STEP), width = round_up(call.head_dim, W);
        return Scratch::size<uint16_t>((rows + ROWS) * dims) + Scratch::size<uint32_t>(dims / 2 * TILE) +
               Scratch::size<uint32_t>(TILE / 2 * width) + Scratch::size<float>(ROWS * width);
    }

    AmxEngine(const AttentionCall &call, Scratch scratch, int rows)
        : call(call),
          dims(round_up(call.head_dim, STEP)),
          width(round_up(call.head_dim, W)),
          units(call.head_dim / 2),
          k_in_place(call.block_size % W == 0 && dims == call.head_dim),
          q(scratch.take<uint16_t>((rows + ROWS) * dims)),
          k_copy(scratch.take<uint32_t>(dims / 2 * TILE)),
          v_copy(scratch.take<uint32_t>(TILE / 2 * width)),
          products(scratch.take<float>(ROWS * width)) {
        configure_tiles();
        memset(q, 0, sizeof(uint16_t) * (rows + ROWS) * dims);
        memset(k_copy, 0, sizeof(uint32_t) * dims / 2 * TILE);
    }
    ~AmxEngine() { release_tiles(); }

    void gather_q(const Panel &panel) {
        for (int row = 0; row < panel.all_rows(); row++) {
            const int r = row % panel.rows;
            const int64_t head = (panel.kv_head + row / panel.rows) * call.group() + panel.first_head + r % panel.heads;
            const uint16_t *from =
                static_cast<const uint16_t *>(call.q) + (panel.token + r / panel.heads) * call.q_stride;
            memcpy(q + row * dims, from + head * call.head_dim, sizeof(uint16_t) * call.head_dim);
        }
    }

    // V is copied where the tile crosses blocks, and where it holds tokens that nobody of the panel sees: those become
    // 0.
    void prepare(const Pages<Bf16> &pages, int head, int64_t start, Tile<Bf16> &tile) {
        const int tokens = pages.panel.seen_in_tile(pages.panel.rows - 1, start);
        if (!k_in_place) copy_k(pages, head, start, tokens, tile);
        if (tokens < TILE || width != call.head_dim || !evenly_spaced(tile)) copy_v(tokens, tile);
    }

    void score(const Panel &panel, int head, const Tile<Bf16> &tile, const Tile<Bf16> *ahead, float *to) const {
        for (int r = 0; r < panel.rows; r += ROWS) {
            zero_tile<C0>();
            zero_tile<C1>();
            for (int64_t d = 0; d < dims; d += STEP) {
                load_tile<A>(q + (head * panel.rows + r) * dims + d, dims * 2);
                load_tile<B0>(tile.k[0] + d / 2 * tile.k_stride, tile.k_stride * 4);
                dot_bf16_tiles<C0, A, B0>();
                load_tile<B1>(tile.k[1] + d / 2 * tile.k_stride, tile.k_stride * 4);
                dot_bf16_tiles<C1, A, B1>();
                if (ahead)
                    for (int64_t unit = d / 2; unit < least((d + STEP) / 2, units); unit++)
                        for (const uint32_t *k : ahead->k) prefetch(k + unit * ahead->k_stride);
            }
            store_tile<C0>(to + r * TILE, TILE * 4);
            store_tile<C1>(to + r * TILE + W, TILE * 4);
        }
    }

    void add(const Panel &panel, int64_t start, int first, int last, const Tile<Bf16> &tile, const Tile<Bf16> *ahead,
             const uint32_t *weights, const float *rescale, float *values) {
        if (ahead)
            for (const uint32_t *v : ahead->v)
                for (int64_t d = 0; d < call.head_dim; d += W) prefetch(v + d);
        const int tokens = panel.seen_in_tile(first, start);
        if (tokens == panel.seen_in_tile(panel.rows - 1, start) || all_finite(tile, tokens)) {
            add_rows(tile, first, last, weights, rescale, values);
            return;
        }
        // 0 x inf would reach rows that do not see it: row by row, the last one first, each without the unseen.
        Tile<Bf16> copy = tile;
        if (copy.v[0] != v_copy) copy_v(TILE, copy);
        for (int r = last - 1; r >= first; r--) {
            clear_v(panel.seen_in_tile(r, start));
            add_rows(copy, r, r + 1, weights, rescale, values);
        }
    }

  private:
    // products[ROWS][d ...] = weights (in tile A) . v
    template <int C, int B>
    void multiply(const uint32_t *v, int64_t stride, int64_t d) const {
        zero_tile<C>();
        load_tile<B>(v + d, stride * 4);
        dot_bf16_tiles<C, A, B>();
        store_tile<C>(products + d, width * 4);
    }

    void add_rows(const Tile<Bf16> &tile, int first, int last, const uint32_t *weights, const float *rescale,
                  float *values) const {
        const uint32_t *const v = tile.v[0];
        const int64_t stride = tile.v[1] - v, row = width;
        for (int begin = first; begin < last; begin += ROWS) {
            load_tile<A>(weights + begin * TILE / 2, TILE * 2);
            int64_t d = 0;
            for (; d + 4 * W <= row; d += 4 * W) {
                multiply<C0, B0>(v, stride, d);
                multiply<C1, B1>(v, stride, d + W);
                multiply<C2, B0>(v, stride, d + 2 * W);
                multiply<C3, B1>(v, stride, d + 3 * W);
            }
            for (; d < row; d += W) multiply<C0, B0>(v, stride, d);
            const float *product = products;
            for (int r = begin; r < least(begin + ROWS, last); r++) {
                const Vec factor = splat(rescale[r]);
                for (float *value = values + r * row; value < values + (r + 1) * row; value += W, product += W)
                    store(value, fma(load(value), factor, load(product)));
            }
        }
    }

    static bool evenly_spaced(const Tile<Bf16> &tile) {
        return tile.v[Tile<Bf16>::V_ROWS - 1] - tile.v[0] == (tile.v[1] - tile.v[0]) * (Tile<Bf16>::V_ROWS - 1);
    }

    // Makes whole steps of dims and whole vectors of tokens.
    void copy_k(const Pages<Bf16> &pages, int head, int64_t start, int tokens, Tile<Bf16> &tile) {
        for (int t = 0; t < tokens; t++) {
            const uint32_t *from = pages.k(head, start + t);
            for (int64_t d = 0; d < units; d++) k_copy[d * TILE + t] = from[d * call.block_size];
        }
        for (int g = 0; g < GROUPS; g++) tile.k[g] = k_copy + g * W;
        tile.k_stride = TILE;
    }

    // V of the first `tokens` in one run; those after are 0.
    void copy_v(int tokens, Tile<Bf16> &tile) {
        const int64_t row = width, dims = call.head_dim;
        const __mmask16 last_dims = static_cast<__mmask16>((1u << dims % W) - 1);
        for (int t = 0; t < Tile<Bf16>::V_ROWS; t++) {
            uint32_t *to = v_copy + t * row;
            const uint32_t *from = tile.v[t];
            tile.v[t] = to;
            if (2 * t >= tokens) continue;
            int64_t d = 0;
            for (; d + W <= dims; d += W) _mm512_storeu_si512(to + d, _mm512_loadu_si512(from + d));
            if (d < dims) _mm512_storeu_si512(to + d, _mm512_maskz_loadu_epi32(last_dims, from + d));
        }
        clear_v(tokens);
    }

    // Copied V from token `tokens` on becomes 0.
    void clear_v(int tokens) {
        if (tokens % 2)
            for (int64_t d = 0; d < width; d++) v_copy[tokens / 2 * width + d] &= 0xffff;
        const int whole = (tokens + 1) / 2;
        memset(v_copy + whole * width, 0, sizeof(uint32_t) * (Tile<Bf16>::V_ROWS - whole) * width);
    }

    // Whether V holds neither infinities nor NaN from the pair of token `tokens` on.
    bool all_finite(const Tile<Bf16> &tile, int tokens) const {
        const __m512i exponent = _mm512_set1_epi16(0x7f80);
        __mmask32 bad = 0;
        for (int t = tokens / 2; t < Tile<Bf16>::V_ROWS; t++)
            for (int64_t d = 0; d < width; d += W)
                bad |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(_mm512_loadu_si512(tile.v[t] + d), exponent), exponent);
        return !bad;
    }
};

}  // namespace

extern "C" int32_t octavo_attention_bf16_amx(const AttentionCall *call) { return paged_attention<AmxEngine>(*call); }
