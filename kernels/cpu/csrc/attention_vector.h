// The products of paged attention on vector registers, for every instruction set and format. Inside a tile a score is
// one chain of dots over ascending dims, a value one over the ascending tokens that the row sees.

#pragma once

#include <utility>

#include "attention_batch.h"

namespace {

// The registers of the instruction set, spent: QK_ROWS x QK_VECS and PV_ROWS x PV_VECS accumulators.
#if defined(__AVX512F__)
constexpr int QK_ROWS = 12, QK_VECS = 2, PV_ROWS = 6, PV_VECS = 4;
#elif defined(__AVX2__)
constexpr int QK_ROWS = 4, QK_VECS = 2, PV_ROWS = 4, PV_VECS = 2;
#else
constexpr int QK_ROWS = 2, QK_VECS = 2, PV_ROWS = 2, PV_VECS = 2;
#endif

// to[row][token] = q . k for M rows. q: [dim units, M].
template <class F, bool PREFETCHES, int M>
void score_rows(const uint32_t *q, const Tile<F> &tile, Ahead<F> &ahead, int64_t units, float *to) {
    for (int g = 0; g < GROUPS; g += QK_VECS) {
        Vec sum[M][QK_VECS];
        for (auto &row : sum)
            for (Vec &s : row) s = splat(0);
        for (int64_t d = 0; d < units; d++) {
            Units k[QK_VECS];
            for (int j = 0; j < QK_VECS; j++) k[j] = load_units(tile.k[g + j] + d * tile.k_stride);
            if (PREFETCHES) ahead.score();
            for (int m = 0; m < M; m++) {
                const Units unit = splat_unit(q[d * M + m]);
                for (int j = 0; j < QK_VECS; j++) sum[m][j] = F::dot(sum[m][j], unit, k[j]);
            }
        }
        for (int m = 0; m < M; m++)
            for (int j = 0; j < QK_VECS; j++) store(to + m * TILE + (g + j) * W, sum[m][j]);
    }
}

// values = values x rescale + weights . v for M rows and N vectors of dims from `d` on, over token units [begin, end)
// of the tile. weights: [M, Tile::V_ROWS].
template <class F, bool PREFETCHES, int M, int N>
void add_values(const uint32_t *weights, const float *rescale, const Tile<F> &tile, Ahead<F> &ahead, int begin, int end,
                int64_t d, float *values, int64_t width) {
    Vec sum[M][N];
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) sum[m][n] = mul(load(values + m * width + n * W), splat(rescale[m]));
    for (int t = begin; t < end; t++) {
        Units v[N];
        for (int n = 0; n < N; n++) v[n] = load_units(tile.v[t] + d + n * W);
        if (PREFETCHES) ahead.add();
        for (int m = 0; m < M; m++) {
            const Units weight = splat_unit(weights[m * Tile<F>::V_ROWS + t]);
            for (int n = 0; n < N; n++) sum[m][n] = F::dot(sum[m][n], weight, v[n]);
        }
    }
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) store(values + m * width + n * W, sum[m][n]);
}

// The two above by their template sizes, so that a run-time size picks an unrolled kernel.
template <class F, bool PREFETCHES>
struct Unrolled {
    using Score = decltype(&score_rows<F, PREFETCHES, 1>);
    using Add = decltype(&add_values<F, PREFETCHES, 1, 1>);

    template <int... M>
    static Score score(int rows, std::integer_sequence<int, M...>) {
        static constexpr Score table[] = {score_rows<F, PREFETCHES, M + 1>...};
        return table[rows - 1];
    }
    static Score score(int rows) { return score(rows, std::make_integer_sequence<int, QK_ROWS>()); }

    template <int... I>
    static Add add(int rows, int vecs, std::integer_sequence<int, I...>) {
        static constexpr Add table[] = {add_values<F, PREFETCHES, I / PV_VECS + 1, I % PV_VECS + 1>...};
        return table[(rows - 1) * PV_VECS + vecs - 1];
    }
    static Add add(int rows, int vecs) { return add(rows, vecs, std::make_integer_sequence<int, PV_ROWS * PV_VECS>()); }
};

template <class F>
class VectorEngine {
    const AttentionCall &call;
    const int64_t width, units;  // of a row: dims, rounded up to whole vectors; dim units
    const bool copies_k, copies_v;  // what lies in pages as it is multiplied, but not in whole vectors
    uint32_t *q, *k_copy, *v_copy, *edges;

  public:
    using Format = F;
    static constexpr int BLOCK = PANEL_ROWS, SLACK = 0;
    static constexpr bool ABREAST = true;

    static int64_t floats(const AttentionCall &call, int rows) {
        return Scratch::size<uint32_t>(rows * call.head_dim) + Scratch::size<uint32_t>(TILE * call.head_dim) +
               Scratch::size<uint32_t>((TILE + 2) * round_up(call.head_dim, W));
    }

    VectorEngine(const AttentionCall &call, Scratch scratch, int rows)
        : call(call),
          width(round_up(call.head_dim, W)),
          units(call.head_dim / F::PAIR),
          copies_k(Decoder<F>::in_place(call.k) && call.block_size % W),
          copies_v(Decoder<F>::in_place(call.v) && call.head_dim % W),
          q(scratch.take<uint32_t>(rows * call.head_dim)),
          k_copy(scratch.take<uint32_t>(TILE * call.head_dim)),
          v_copy(scratch.take<uint32_t>((TILE + 2) * width)),
          edges(v_copy + TILE * width) {}

    static int64_t score_parts(const AttentionCall &call) { return call.head_dim / F::PAIR * (GROUPS / QK_VECS); }
    static int64_t add_parts(const AttentionCall &call) {
        return Tile<F>::V_ROWS * ceil_div(round_up(call.head_dim, W), PV_VECS * W);
    }

    // For each key/value head blocks of QK_ROWS rows, each [dim units, rows of the block].
    void gather_q(const Panel &panel, const ModelRows<F> &rows) {
        for (int row = 0; row < panel.all_rows(); row++) {
            const int r = row % panel.rows, begin = r / QK_ROWS * QK_ROWS, block = least(QK_ROWS, panel.rows - begin);
            const typename F::Number *from = rows.query(panel, row);
            uint32_t *to = q + (row - r + begin) * units + (r - begin);
            for (int64_t d = 0; d < units; d++) memcpy(to + d * block, from + d * F::PAIR, sizeof(uint32_t));
        }
    }

    void prepare(const Pages<F> &pages, int head, int64_t start, Tile<F> &tile) {
        if (copies_k) {
            pages.gather(call.k.codes + (pages.panel.kv_head + head) * pages.k.head, start, units, k_copy);
            for (int g = 0; g < GROUPS; g++) tile.k[g] = k_copy + g * W;
            tile.k_stride = TILE;
        }
        if (copies_v) copy_v(Panel::in_tile(pages.panel.all_end(), start), tile);
    }

    void score(const Panel &panel, int head, int first, int last, const Tile<F> &tile, Ahead<F> &ahead,
               float *to) const {
        for (int r = first / QK_ROWS * QK_ROWS; r < last; r += QK_ROWS) {
            const int rows = least(QK_ROWS, panel.rows - r);
            const auto kernel = ahead.prefetches() ? Unrolled<F, true>::score(rows) : Unrolled<F, false>::score(rows);
            kernel(q + (head * panel.rows + r) * units, tile, ahead, units, to + r * TILE);
        }
    }

    void add(const Panel &panel, int64_t start, int first, int last, const Tile<F> &tile, Ahead<F> &ahead,
             const uint32_t *weights, const float *rescale, float *values) const {
        if (panel.all_see_tile(start)) {
            add_rows(tile, ahead, 0, Tile<F>::V_ROWS, first, last, weights, rescale, values);
            return;
        }
        for (int r = first; r < last; r += panel.heads) {
            const int begin = panel.begin_in_tile(r, start), end = panel.end_in_tile(r, start);
            Tile<F> mine = tile;
            if (begin % F::PAIR) keep_half(mine.v[begin / F::PAIR], 0xffff0000, edges);
            if (end % F::PAIR) keep_half(mine.v[end / F::PAIR], 0xffff, edges + width);
            add_rows(mine, ahead, begin / F::PAIR, ceil_div(end, F::PAIR), r, r + panel.heads, weights, rescale,
                     values);
        }
    }

  private:
    // A token whose partner is not seen: of its units all but its own half becomes 0, in a copy.
    void keep_half(const uint32_t *&v, uint32_t half, uint32_t *copy) const {
        for (int64_t d = 0; d < width; d++) copy[d] = v[d] & half;
        v = copy;
    }

    void add_rows(const Tile<F> &tile, Ahead<F> &ahead, int begin, int end, int first, int last,
                  const uint32_t *weights, const float *rescale, float *values) const {
        for (int64_t d = 0; d < width; d += PV_VECS * W) {
            const int vecs = static_cast<int>(least<int64_t>(PV_VECS, (width - d) / W));
            for (int r = first; r < last; r += PV_ROWS) {
                const int rows = least(PV_ROWS, last - r);
                const auto kernel =
                    ahead.prefetches() ? Unrolled<F, true>::add(rows, vecs) : Unrolled<F, false>::add(rows, vecs);
                kernel(weights + r * Tile<F>::V_ROWS, rescale + r, tile, ahead, begin, end, d, values + r * width + d,
                       width);
            }
        }
    }

    // Makes whole vectors of dims where head_dim is no multiple of one.
    void copy_v(int tokens, Tile<F> &tile) {
        for (int t = 0; t * F::PAIR < tokens; t++) {
            memcpy(v_copy + t * width, tile.v[t], sizeof(uint32_t) * call.head_dim);
            tile.v[t] = v_copy + t * width;
        }
    }
};

}  // namespace
