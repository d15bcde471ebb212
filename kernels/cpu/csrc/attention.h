// Paged attention: one arithmetic for every row, whatever the batch, the chunk, the place or the number of threads.
//
// A row is one query head of one token; it sees the first `seen` tokens of its sequence. Its result is defined by
//
//     tiles   of 32 tokens at absolute positions: raw scores (a chain of dots over ascending dims), times scale x log2 e,
//             maximum, one rescale of what was summed so far, weights exp2(score - maximum) rounded to the format,
//             weights x V (a chain of dots over ascending tokens). Tokens beyond `seen` are not touched by the row.
//     splits  of 512 tokens at absolute positions: each starts afresh; their (maximum, sum, accumulator) are merged in order.
//
// and by nothing else. Everything below only decides which rows share a loaded tile (all query heads of a key/value head;
// in prefill those of several tokens too) and which thread computes what: a work item is a panel of rows of one sequence
// and key/value head, over all of its splits or, where items are few, over one of them. Pages are read in place.

#pragma once

#include <cstdlib>
#include <utility>

#include "formats.h"
#include "parallel.h"

// The arguments of an entry. Strides in elements, offsets in bytes.
struct AttentionCall {
    const void *q;           // [T, heads, head_dim], dense inside a row
    int64_t q_stride;        // between rows
    const uint8_t *pool;     // [blocks, block_bytes]
    int64_t block_bytes;
    int64_t k_offset, v_offset;  // of this layer inside a block
    int64_t block_size;          // tokens
    int64_t heads, kv_heads, head_dim;
    const int32_t *block_tables;  // [sequences, table_stride]
    int64_t table_stride;
    const int32_t *query_start;  // [sequences + 1]
    const int32_t *seq_lens;     // [sequences]
    int64_t sequences;
    float scale;
    void *out;  // [T, heads, head_dim]
    int64_t threads;
};

namespace {

constexpr int TILE = 32;
constexpr int SPLIT = 512;
constexpr int MAX_ROWS = 64;  // rows of a panel
constexpr int GROUPS = TILE / W;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
template <class T>
T least(T a, T b) {
    return a < b ? a : b;
}

// What rows have summed up: per row the maximum, W partial sums of the weights, and the weighted values [width].
struct Sums {
    float *maximum, *weight, *values;

    static int64_t floats(int64_t rows, int64_t width) { return round_up(rows, W) + rows * W + rows * width; }
    static Sums at(float *memory, int64_t rows) {
        float *weight = memory + round_up(rows, W);
        return {memory, weight, weight + rows * W};
    }
};

// Rows [0, rows) of a panel: heads [first_head, first_head + heads) of tokens from `token` on, token by token.
struct Panel {
    int64_t sequence, kv_head, token, first_head;
    int heads, rows;
    int64_t seen;  // tokens that the first token's rows see; each further token sees one more

    int64_t row_sees(int row) const { return seen + row / heads; }
    int64_t all_see() const { return row_sees(rows - 1); }
    // The first row that sees token `position`.
    int first_row_seeing(int64_t position) const {
        return position < seen ? 0 : static_cast<int>(position - seen + 1) * heads;
    }
};

// A tile's K and V: GROUPS vectors of W tokens, `k_stride` units from one dim unit to the next; V rows by token unit.
template <class F>
struct Tile {
    const uint32_t *k[GROUPS];
    int64_t k_stride;
    const uint32_t *v[TILE / F::PAIR];
};

// The registers of the instruction set, spent: QK_ROWS x QK_GROUPS and PV_ROWS x PV_VECS accumulators.
#if defined(__AVX512F__)
constexpr int QK_ROWS = 12, QK_GROUPS = 2, PV_ROWS = 6, PV_VECS = 4;
#elif defined(__AVX2__)
constexpr int QK_ROWS = 4, QK_GROUPS = 2, PV_ROWS = 4, PV_VECS = 2;
#else
constexpr int QK_ROWS = 2, QK_GROUPS = 2, PV_ROWS = 2, PV_VECS = 2;
#endif

// scores[row][token] = q . k over `units` dim units. q: [units, M].
template <class F, int M>
void score_rows(const uint32_t *q, const Tile<F> &tile, int64_t units, float *scores) {
    for (int g = 0; g < GROUPS; g += QK_GROUPS) {
        Vec sum[M][QK_GROUPS];
        for (auto &row : sum)
            for (Vec &s : row) s = splat(0);
        for (int64_t d = 0; d < units; d++) {
            Units k[QK_GROUPS];
            for (int j = 0; j < QK_GROUPS; j++) k[j] = load_units(tile.k[g + j] + d * tile.k_stride);
            for (int m = 0; m < M; m++) {
                const Units unit = splat_unit(q[d * M + m]);
                for (int j = 0; j < QK_GROUPS; j++) sum[m][j] = F::dot(sum[m][j], unit, k[j]);
            }
        }
        for (int m = 0; m < M; m++)
            for (int j = 0; j < QK_GROUPS; j++) store(scores + m * TILE + (g + j) * W, sum[m][j]);
    }
}

// values[row][dims] = values x rescale[row] + weights[row] . v over the first `tokens` of a tile, N vectors of dims from
// dim `d` on. weights: [M, TILE / PAIR] units. A last token without its partner does not touch the partner's V.
template <class F, int M, int N>
void add_values(const uint32_t *weights, const float *rescale, const Tile<F> &tile, int tokens, int64_t d, float *values,
                int64_t width) {
    constexpr int PER_ROW = TILE / F::PAIR;
    Vec sum[M][N];
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) sum[m][n] = mul(load(values + m * width + n * W), splat(rescale[m]));
    const int whole = tokens / F::PAIR;
    for (int t = 0; t < whole; t++) {
        Units v[N];
        for (int n = 0; n < N; n++) v[n] = load_units(tile.v[t] + d + n * W);
        for (int m = 0; m < M; m++) {
            const Units weight = splat_unit(weights[m * PER_ROW + t]);
            for (int n = 0; n < N; n++) sum[m][n] = F::dot(sum[m][n], weight, v[n]);
        }
    }
    if (tokens % F::PAIR)
        for (int n = 0; n < N; n++) {
            const Units v = and_units(load_units(tile.v[whole] + d + n * W), splat_unit(0xffff));
            for (int m = 0; m < M; m++) sum[m][n] = F::dot(sum[m][n], splat_unit(weights[m * PER_ROW + whole]), v);
        }
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) store(values + m * width + n * W, sum[m][n]);
}

// Tables of the two above by their template sizes, so that a run-time size picks an unrolled kernel.
template <class F>
struct Kernels {
    using Score = void (*)(const uint32_t *, const Tile<F> &, int64_t, float *);
    using AddValues = void (*)(const uint32_t *, const float *, const Tile<F> &, int, int64_t, float *, int64_t);

    template <int... M>
    static Score score(int rows, std::integer_sequence<int, M...>) {
        static constexpr Score table[] = {score_rows<F, M + 1>...};
        return table[rows - 1];
    }
    static Score score(int rows) { return score(rows, std::make_integer_sequence<int, QK_ROWS>()); }

    template <int... I>
    static AddValues add(int rows, int vecs, std::integer_sequence<int, I...>) {
        static constexpr AddValues table[] = {add_values<F, I / PV_VECS + 1, I % PV_VECS + 1>...};
        return table[(rows - 1) * PV_VECS + vecs - 1];
    }
    static AddValues add(int rows, int vecs) {
        return add(rows, vecs, std::make_integer_sequence<int, PV_ROWS * PV_VECS>());
    }
};

// merged = merged (+) next, for rows [first, rows).
inline void merge(const Sums &merged, const Sums &next, int first, int rows, int64_t width) {
    for (int r = first; r < rows; r++) {
        const Vec old_max = splat(merged.maximum[r]), new_max = splat(next.maximum[r]);
        const Vec top = max(old_max, new_max);
        const Vec a = exp2_negative(sub(old_max, top)), b = exp2_negative(sub(new_max, top));
        store(merged.weight + r * W, fma(load(next.weight + r * W), b, mul(load(merged.weight + r * W), a)));
        for (int64_t d = 0; d < width; d += W) {
            float *to = merged.values + r * width + d;
            store(to, fma(load(next.values + r * width + d), b, mul(load(to), a)));
        }
        merged.maximum[r] = max_of(top);
    }
}

// One thread's work: its scratch memory and the walk over tiles and splits.
template <class F>
class Worker {
    using Number = typename F::Number;
    static constexpr int PER_ROW = TILE / F::PAIR;

    const AttentionCall &call;
    const int64_t width, k_units;  // dims and dim units of a row; width rounded up to whole vectors
    const bool k_in_place, v_in_place;
    uint32_t *q, *weights, *k_copy, *v_copy;
    float *scores, *next_max, *rescale;
    Sums current;

  public:
    Sums whole;  // for a panel that this thread works on alone

    static int64_t width_of(const AttentionCall &call) { return round_up(call.head_dim, W); }
    static int64_t scratch_floats(const AttentionCall &call, int rows) {
        const int64_t width = width_of(call);
        return rows * call.head_dim + 2 * TILE * width + rows * TILE * 2 + 2 * round_up(rows, W) +
               2 * Sums::floats(rows, width) + 8 * W;
    }

    Worker(const AttentionCall &call, float *scratch, int rows)
        : call(call), width(width_of(call)), k_units(call.head_dim / F::PAIR),
          k_in_place(call.block_size % W == 0), v_in_place(call.head_dim % W == 0) {
        auto take = [&](int64_t floats) {
            float *part = scratch;
            scratch += round_up(floats, W);
            return part;
        };
        weights = reinterpret_cast<uint32_t *>(take(rows * TILE));
        scores = take(rows * TILE);
        q = reinterpret_cast<uint32_t *>(take(rows * call.head_dim));
        k_copy = reinterpret_cast<uint32_t *>(take(TILE * width));
        v_copy = reinterpret_cast<uint32_t *>(take(TILE * width));
        next_max = take(round_up(rows, W));
        rescale = take(round_up(rows, W));
        whole = Sums::at(take(Sums::floats(rows, width)), rows);
        current = Sums::at(take(Sums::floats(rows, width)), rows);
    }

    // The panel's rows over splits [first, last), merged into `sums`.
    void attend(const Panel &panel, int64_t first, int64_t last, const Sums &sums) {
        gather_q(panel);
        attend_split(panel, first, sums);
        for (int64_t split = first + 1; split < last; split++) {
            attend_split(panel, split, current);
            merge(sums, current, panel.first_row_seeing(split * SPLIT), panel.rows, width);
        }
    }

    void write(const Panel &panel, const Sums &sums) const {
        for (int r = 0; r < panel.rows; r++) {
            const float total = sum_of(load(sums.weight + r * W));
            const int64_t row = panel.token + r / panel.heads;
            const int64_t head = panel.kv_head * (call.heads / call.kv_heads) + panel.first_head + r % panel.heads;
            Number *out = static_cast<Number *>(call.out) + (row * call.heads + head) * call.head_dim;
            for (int64_t d = 0; d < call.head_dim; d++) out[d] = F::narrow(sums.values[r * width + d] / total);
        }
    }

  private:
    void reset(const Sums &sums, int rows) const {
        for (int r = 0; r < rows; r++) sums.maximum[r] = -INFINITY;
        memset(sums.weight, 0, sizeof(float) * rows * W);
        memset(sums.values, 0, sizeof(float) * rows * width);
    }

    // The panel's queries in blocks of QK_ROWS rows, each [dim units, rows of the block].
    void gather_q(const Panel &panel) {
        const int64_t group = call.heads / call.kv_heads;
        for (int r = 0; r < panel.rows; r++) {
            const int64_t head = panel.kv_head * group + panel.first_head + r % panel.heads;
            const Number *from =
                static_cast<const Number *>(call.q) + (panel.token + r / panel.heads) * call.q_stride + head * call.head_dim;
            const int start = r / QK_ROWS * QK_ROWS, block = least(QK_ROWS, panel.rows - start);
            uint32_t *to = q + start * k_units + (r - start);
            for (int64_t d = 0; d < k_units; d++) memcpy(to + d * block, from + d * F::PAIR, sizeof(uint32_t));
        }
    }

    void attend_split(const Panel &panel, int64_t split, const Sums &sums) {
        const int64_t end = least(panel.all_see(), (split + 1) * SPLIT);
        reset(sums, panel.rows);
        for (int64_t start = split * SPLIT; start < end; start += TILE) {
            const Tile<F> tile = find_tile(panel, start);
            for (int r = 0; r < panel.rows; r += QK_ROWS) {
                const int rows = least(QK_ROWS, panel.rows - r);
                Kernels<F>::score(rows)(q + r * k_units, tile, k_units, scores + r * TILE);
            }
            weigh(panel, start, sums);
            if (start + TILE <= panel.seen) {
                add_rows(tile, TILE, 0, panel.rows, sums);
                continue;
            }
            for (int r = panel.first_row_seeing(start); r < panel.rows; r += panel.heads)
                add_rows(tile, tokens_seen(panel, r, start), r, r + panel.heads, sums);
        }
    }

    static int tokens_seen(const Panel &panel, int row, int64_t start) {
        return static_cast<int>(least<int64_t>(TILE, panel.row_sees(row) - start));
    }

    // Scores to weights for the rows that see the tile: new maxima, factors to rescale by, and sums of weights.
    void weigh(const Panel &panel, int64_t start, const Sums &sums) {
        const int first = panel.first_row_seeing(start);
        const Vec scale = splat(call.scale * 1.44269504f);
        for (int r = first; r < panel.rows; r++) {
            const int tokens = tokens_seen(panel, r, start);
            Vec top = splat(-INFINITY);
            for (int g = 0; g < GROUPS; g++) {
                float *score = scores + r * TILE + g * W;
                const Vec scaled = keep_first(mul(load(score), scale), tokens - g * W);
                store(score, scaled);
                top = max(top, scaled);
            }
            const float tile_max = max_of(top), old_max = sums.maximum[r];
            next_max[r] = tile_max > old_max || tile_max != tile_max ? tile_max : old_max;
        }
        for (int r = first / W * W; r < panel.rows; r += W)  // rows before `first` get numbers that nobody reads
            store(rescale + r, exp2_negative(sub(load(sums.maximum + r), load(next_max + r))));
        for (int r = first; r < panel.rows; r++) {
            const Vec top = splat(next_max[r]);
            Vec weight[GROUPS];
            for (int g = 0; g < GROUPS; g++) weight[g] = exp2_negative(sub(load(scores + r * TILE + g * W), top));
            F::pack(weights + r * PER_ROW, weight);
            Vec sum = weight[0];
            for (int g = 1; g < GROUPS; g++) sum = add(sum, weight[g]);
            store(sums.weight + r * W, fma(load(sums.weight + r * W), splat(rescale[r]), sum));
            sums.maximum[r] = next_max[r];
        }
    }

    void add_rows(const Tile<F> &tile, int tokens, int first, int last, const Sums &sums) {
        for (int64_t d = 0; d < width; d += PV_VECS * W) {
            const int vecs = static_cast<int>(least<int64_t>(PV_VECS, (width - d) / W));
            for (int r = first; r < last; r += PV_ROWS) {
                const int rows = least(PV_ROWS, last - r);
                Kernels<F>::add(rows, vecs)(weights + r * PER_ROW, rescale + r, tile, tokens, d,
                                            sums.values + r * width + d, width);
            }
        }
    }

    // Where the tile of tokens [start, start + TILE) lies. Tokens past the panel's last one may point anywhere readable.
    Tile<F> find_tile(const Panel &panel, int64_t start) {
        Tile<F> tile;
        const int64_t end = panel.all_see();
        tile.k_stride = k_in_place ? call.block_size : TILE;
        for (int g = 0; g < GROUPS; g++) {
            const int64_t token = least(start + g * W, (end - 1) / W * W);
            tile.k[g] = k_in_place ? k_units_of(panel, token) : k_copy + g * W;
        }
        for (int t = 0; t < PER_ROW; t++) {
            const int64_t token = least(start + t * F::PAIR, (end - 1) / F::PAIR * F::PAIR);
            tile.v[t] = v_in_place ? v_units_of(panel, token) : v_copy + t * width;
        }
        if (!k_in_place) copy_k(panel, start, end);
        if (!v_in_place) copy_v(panel, start, end);
        return tile;
    }

    void copy_k(const Panel &panel, int64_t start, int64_t end) {
        for (int64_t token = start; token < least(start + TILE, end); token++) {
            const uint32_t *from = k_units_of(panel, token);
            for (int64_t d = 0; d < k_units; d++) k_copy[d * TILE + (token - start)] = from[d * call.block_size];
        }
    }

    void copy_v(const Panel &panel, int64_t start, int64_t end) {
        for (int64_t token = start; token < least(start + TILE, end); token += F::PAIR)
            memcpy(v_copy + (token - start) / F::PAIR * width, v_units_of(panel, token), sizeof(uint32_t) * call.head_dim);
    }

    const uint32_t *block(const Panel &panel, int64_t token, int64_t offset) const {
        const int64_t id = call.block_tables[panel.sequence * call.table_stride + token / call.block_size];
        return reinterpret_cast<const uint32_t *>(call.pool + id * call.block_bytes + offset);
    }
    const uint32_t *k_units_of(const Panel &panel, int64_t token) const {
        const int64_t head_units = k_units * call.block_size;
        return block(panel, token, call.k_offset) + panel.kv_head * head_units + token % call.block_size;
    }
    const uint32_t *v_units_of(const Panel &panel, int64_t token) const {
        const int64_t rows = call.block_size / F::PAIR, row = token % call.block_size / F::PAIR;
        return block(panel, token, call.v_offset) + (panel.kv_head * rows + row) * call.head_dim;
    }
};

// A panel's work, whole or one split of it.
struct Item {
    Panel panel;
    int64_t split;  // -1: all of them
    float *sums;    // of the panel's first split; split s follows at s times the size of a panel's sums
    int *left;      // splits of the panel that are not done yet
};

inline int64_t splits_of(const Panel &panel) { return ceil_div(panel.all_see(), SPLIT); }
inline int64_t tiles_of(const Panel &panel) { return ceil_div(panel.all_see(), TILE); }

// Calls visit(panel) for every panel of the batch; within a sequence the longest ones first.
template <class Visit>
void for_each_panel(const AttentionCall &call, Visit visit) {
    const int64_t group = call.heads / call.kv_heads, heads = least<int64_t>(group, MAX_ROWS), tokens = MAX_ROWS / heads;
    for (int64_t b = 0; b < call.sequences; b++) {
        const int64_t first = call.query_start[b], last = call.query_start[b + 1];
        for (int64_t chunk = ceil_div(last - first, tokens) - 1; chunk >= 0; chunk--)
            for (int64_t kv_head = 0; kv_head < call.kv_heads; kv_head++)
                for (int64_t head = 0; head < group; head += heads) {
                    const int64_t token = first + chunk * tokens, count = least(tokens, last - token);
                    const int64_t width = least(heads, group - head);
                    visit(Panel{b, kv_head, token, head, static_cast<int>(width), static_cast<int>(width * count),
                                call.seq_lens[b] - (last - token) + 1});
                }
    }
}

// How a call is divided: whole panels, except those that would keep one thread busy long after the others.
struct Division {
    int64_t items = 0, partial_panels = 0, partial_sums = 0;  // the last: how many sums of one panel's split
    int rows = 0;                                             // of the largest panel
    int threads = 1;
    int64_t largest_whole = 0;  // in row tiles

    explicit Division(const AttentionCall &call) {
        constexpr int64_t ITEMS_PER_THREAD = 4, DIMS_PER_THREAD = 1 << 14;  // below the latter a thread is not worth waking
        int64_t total = 0;
        for_each_panel(call, [&](const Panel &panel) { total += panel.rows * tiles_of(panel); });
        threads = static_cast<int>(least(call.threads, total * call.head_dim / DIMS_PER_THREAD + 1));
        largest_whole = threads > 1 ? total / (threads * ITEMS_PER_THREAD) : total;
        for_each_panel(call, [&](const Panel &panel) {
            rows = rows < panel.rows ? panel.rows : rows;
            const int64_t splits = splits_of(panel);
            items += divides(panel) ? splits : 1;
            partial_panels += divides(panel);
            partial_sums += divides(panel) ? splits : 0;
        });
    }

    bool divides(const Panel &panel) const {
        return splits_of(panel) > 1 && panel.rows * tiles_of(panel) > largest_whole;
    }
};

template <class F>
class Batch {
    const AttentionCall &call;
    const Division division;
    const int64_t sums_floats, scratch_floats;
    char *const memory;
    Item *const items;
    int *const left;
    float *const sums, *const scratch;
    int next = 0;

  public:
    explicit Batch(const AttentionCall &call)
        : call(call), division(call), sums_floats(round_up(Sums::floats(division.rows, Worker<F>::width_of(call)), W)),
          scratch_floats(round_up(Worker<F>::scratch_floats(call, division.rows), W)),
          memory(static_cast<char *>(malloc(64 + sizeof(Item) * division.items + sizeof(int) * division.partial_panels +
                                            sizeof(float) * (sums_floats * division.partial_sums +
                                                             scratch_floats * division.threads)))),
          items(reinterpret_cast<Item *>(memory)), left(reinterpret_cast<int *>(items + division.items)),
          sums(reinterpret_cast<float *>(left + division.partial_panels)),
          scratch(sums + sums_floats * division.partial_sums) {}
    ~Batch() { free(memory); }

    bool ready() const { return memory != nullptr; }

    void run() {
        list_items();
        auto body = [&](int thread) {
            Worker<F> worker(call, scratch + thread * scratch_floats, division.rows);
            for (;;) {
                const int index = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
                if (index >= division.items) return;
                work(worker, items[index]);
            }
        };
        on_threads(division.threads, body);
    }

  private:
    void list_items() {
        Item *item = items;
        int *panel_left = left;
        float *panel_sums = sums;
        for_each_panel(call, [&](const Panel &panel) {
            if (!division.divides(panel)) {
                *item++ = {panel, -1, nullptr, nullptr};
                return;
            }
            const int splits = static_cast<int>(splits_of(panel));
            *panel_left = splits;
            for (int s = 0; s < splits; s++) *item++ = {panel, s, panel_sums, panel_left};
            panel_left++;
            panel_sums += splits * sums_floats;
        });
    }

    Sums split_sums(const Item &item, int64_t split) const {
        return Sums::at(item.sums + split * sums_floats, item.panel.rows);
    }

    // Whoever finishes the last split of a panel merges all of them, in order.
    void work(Worker<F> &worker, const Item &item) {
        if (item.split < 0) {
            worker.attend(item.panel, 0, splits_of(item.panel), worker.whole);
            worker.write(item.panel, worker.whole);
            return;
        }
        worker.attend(item.panel, item.split, item.split + 1, split_sums(item, item.split));
        if (__atomic_sub_fetch(item.left, 1, __ATOMIC_ACQ_REL)) return;
        const Sums merged = split_sums(item, 0);
        for (int64_t s = 1; s < splits_of(item.panel); s++)
            merge(merged, split_sums(item, s), item.panel.first_row_seeing(s * SPLIT), item.panel.rows,
                  Worker<F>::width_of(call));
        worker.write(item.panel, merged);
    }
};

template <class F>
int32_t paged_attention(const AttentionCall &call) {
    Batch<F> batch(call);
    if (!batch.ready()) return -1;
    batch.run();
    return 0;
}

}  // namespace
