// Paged attention: one arithmetic for every row, whatever the batch, the chunk, the place or the number of threads.
//
// A row is one query head of one token; it sees the first `seen` tokens of its sequence, or the last `window` of those.
// Its result is defined by
//
//     tiles   of 32 tokens at absolute positions: raw scores (q . k), their maximum, one rescale of what was summed so
//             far, weights exp2(score x scale x log2 e - maximum), rounded to the format, weights x V
//     splits  of 512 tokens at absolute positions: each starts afresh; (maximum, sum, values) are merged in order
//     sinks   one logit a query head: at the very end it joins the row's maximum and sum
//
// and the order in which an engine adds products inside a tile. With a softcap, softcap x tanh(score x scale / softcap)
// takes the place of score x scale. The sums begin at the first tile and split that hold a token the row sees. Tokens
// that a row does not see add nothing to it, whatever their slots hold; pages of which no row of a panel sees anything
// are not read, nor are their entries of the block table. Everything else here only decides which rows share a loaded
// tile (all query heads of a key/value head; in prefill those of several tokens too) and which thread computes what.
// Pages are read in place.
//
// An engine does the products: `VectorEngine` (attention_vector.h) or `AmxEngine` (attention_amx.cpp). It has
//
//     Format, Engine(call, scratch, rows), floats(call, rows): the size of its scratch memory
//     gather_q(panel)                     keeps the panel's queries in its own order
//     prepare(pages, head, start, tile)   copies what it cannot use where it lies, and points the tile at the copies
//     score(panel, head, tile, ahead, to)
//                                         scores [rows, TILE] of one key/value head of the panel
//     add(panel, start, first, last, tile, ahead, weights, rescale, values)
//                                         values = values x rescale + weights x V, for rows [first, last) of the head:
//                                         blocks of BLOCK rows, the last block first, while others' weights are made
//
// `ahead`, if any, is a tile to prefetch, its K in score, its V in add, spread over the work: the hardware does not
// follow a block table, and prefetches in a row only wait for each other.

#pragma once

#include <cstdlib>

#include "formats.h"
#include "parallel.h"

// The arguments of an entry. Strides in elements, offsets in bytes.
struct AttentionCall {
    const void *q;  // [T, heads, head_dim], dense inside a row
    int64_t q_stride;  // between rows
    const uint8_t *pool;  // [blocks, block_bytes]
    int64_t block_bytes;
    int64_t k_offset, v_offset;  // of this layer inside a block
    int64_t block_size;  // tokens
    int64_t heads, kv_heads, head_dim;
    const int32_t *block_tables;  // [sequences, table_stride]
    int64_t table_stride;
    const int32_t *query_start;  // [sequences + 1]
    const int32_t *seq_lens;  // [sequences]
    int64_t sequences;
    int64_t window;  // tokens that a row sees at most; so large that it hides none where there is no window
    float scale;
    float softcap;  // 0: none
    const float *sinks;  // [heads], or null
    void *out;  // [T, heads, head_dim]

    int64_t group() const { return heads / kv_heads; }
};

namespace {

constexpr int TILE = 32;
constexpr int SPLIT = 512;
constexpr int GROUPS = TILE / W;  // vectors of tokens in a tile
constexpr int PANEL_ROWS = 64;  // most rows of a panel
constexpr float LOG2_E = 1.44269504f;
constexpr int STREAMING_ROWS = 16;  // with so few rows a key/value head, memory is what takes the time

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
template <class T>
T least(T a, T b) {
    return a < b ? a : b;
}

// Hands out pieces of a worker's memory, each on its own cache lines.
struct Scratch {
    float *memory;
    template <class T>
    T *take(int64_t count) {
        T *piece = reinterpret_cast<T *>(memory);
        memory += size<T>(count);
        return piece;
    }
    template <class T>
    static int64_t size(int64_t count) {
        return round_up(count * static_cast<int64_t>(sizeof(T)), 64) / 4;
    }
};

// What rows have summed up: per row the maximum, W partial sums of the weights, and the weighted values [width].
struct Sums {
    float *maximum, *weight, *values;
    int64_t width;

    static int64_t floats(int64_t rows, int64_t width) {
        return Scratch::size<float>(rows + W) + Scratch::size<float>(rows * W) + Scratch::size<float>(rows * width);
    }
    static Sums in(Scratch scratch, int64_t rows, int64_t width) {
        float *maximum = scratch.take<float>(rows + W), *weight = scratch.take<float>(rows * W);
        return {maximum, weight, scratch.take<float>(rows * width), width};
    }
    Sums from_row(int64_t row) const { return {maximum + row, weight + row * W, values + row * width, width}; }

    void reset(int rows) const {
        for (int r = 0; r < rows; r++) maximum[r] = -INFINITY;
        memset(weight, 0, sizeof(float) * rows * W);
        memset(values, 0, sizeof(float) * rows * width);
    }

    // Row = next.
    void adopt(const Sums &next, int row) const {
        maximum[row] = next.maximum[row];
        memcpy(weight + row * W, next.weight + row * W, sizeof(float) * W);
        memcpy(values + row * width, next.values + row * width, sizeof(float) * width);
    }

    // Row = row (+) next.
    void merge(const Sums &next, int row) const {
        const float top = larger(maximum[row], next.maximum[row]);
        const Vec a = exp2_negative(splat(maximum[row] - top)), b = exp2_negative(splat(next.maximum[row] - top));
        store(weight + row * W, fma(load(next.weight + row * W), b, mul(load(weight + row * W), a)));
        for (int64_t d = row * width; d < (row + 1) * width; d += W)
            store(values + d, fma(load(next.values + d), b, mul(load(values + d), a)));
        maximum[row] = top;
    }

    // A logit (base 2) that has no value joins the row.
    void join(float logit, int row) const {
        const float top = larger(maximum[row], logit);
        const Vec a = exp2_negative(splat(maximum[row] - top)), b = exp2_negative(splat(logit - top));
        store(weight + row * W, mul(load(weight + row * W), a));
        weight[row * W] += max_of(b);
        for (int64_t d = row * width; d < (row + 1) * width; d += W) store(values + d, mul(load(values + d), a));
        maximum[row] = top;
    }
};

// Rows of one sequence that walk its pages together: for each of `kv_heads` key/value heads `rows` rows, these being
// query heads [first_head, first_head + heads) of the head's group, of `tokens` tokens from `token` on, token by token.
struct Panel {
    int64_t sequence, kv_head, token, first_head;
    int kv_heads, heads, tokens, rows;
    int64_t seen;  // where the sight of the first token's rows ends; each further token sees one more
    int64_t window;

    int all_rows() const { return rows * kv_heads; }
    // A row sees the tokens [begin, end).
    int64_t end(int row) const { return seen + row / heads; }
    int64_t begin(int row) const { return begin_to(end(row)); }
    int64_t begin_to(int64_t end) const { return end > window ? end - window : 0; }
    int64_t all_begin() const { return begin_to(seen); }
    int64_t all_end() const { return seen + tokens - 1; }
    int64_t last_begin() const { return begin_to(all_end()); }
    // What of it lies in the tile that starts at `start`, counted from there.
    int end_in_tile(int row, int64_t start) const { return in_tile(end(row), start); }
    int begin_in_tile(int row, int64_t start) const { return in_tile(begin(row), start); }
    static int in_tile(int64_t position, int64_t start) {
        return position < start ? 0 : static_cast<int>(least<int64_t>(TILE, position - start));
    }
    bool all_see_tile(int64_t start) const { return start + TILE <= seen && last_begin() <= start; }
    // The rows that see any of the tokens [from, to): [first_row, end_row).
    int first_row(int64_t from) const { return from < seen ? 0 : static_cast<int>(from - seen + 1) * heads; }
    int end_row(int64_t to) const {
        return last_begin() < to ? rows : static_cast<int>(to - seen + window) * heads;
    }
    int64_t first_tile() const { return all_begin() / TILE * TILE; }
    int64_t first_split() const { return all_begin() / SPLIT; }
    int64_t end_split() const { return ceil_div(all_end(), SPLIT); }
    int64_t splits() const { return end_split() - first_split(); }
    int64_t cost() const { return all_rows() * ceil_div(all_end() - first_tile(), TILE); }
    void merge(const Sums &sums, const Sums &next, int64_t split) const {
        const int64_t from = split * SPLIT;
        for (int head = 0; head < kv_heads; head++)
            for (int r = first_row(from); r < end_row(from + SPLIT); r++)
                begin(r) < from ? sums.merge(next, head * rows + r) : sums.adopt(next, head * rows + r);
    }
};

// Where a tile lies: K as GROUPS vectors of W tokens, `k_stride` units from one dim unit to the next; V by token units.
template <class F>
struct Tile {
    static constexpr int V_ROWS = TILE / F::PAIR;
    const uint32_t *k[GROUPS], *v[V_ROWS];
    int64_t k_stride;

    // The same tokens of the head that lies `units` further on.
    Tile moved(int64_t units) const {
        Tile tile = *this;
        for (auto &k : tile.k) k += units;
        for (auto &v : tile.v) v += units;
        return tile;
    }
};

// Finds tiles in the pages of one panel.
template <class F>
struct Pages {
    const AttentionCall &call;
    const Panel &panel;
    const int64_t first, last;  // blocks of the sequence that hold a token which any row sees

    Pages(const AttentionCall &call, const Panel &panel)
        : call(call),
          panel(panel),
          first(panel.all_begin() / call.block_size),
          last((panel.all_end() - 1) / call.block_size) {}

    int64_t head_units() const { return call.head_dim / F::PAIR * call.block_size; }

    // The tile of tokens from `start` on, for the panel's first key/value head. Vectors and rows of tokens outside of
    // the panel's blocks point into the nearest one: readable, not seen. K vectors are whole only where W divides the
    // block size.
    Tile<F> at(int64_t start) const {
        Tile<F> tile;
        tile.k_stride = call.block_size;
        int64_t index = start / call.block_size, offset = start % call.block_size;
        const uint8_t *block = find(index < first ? first : index);
        for (int t = 0; t < TILE; t += F::PAIR) {
            if (offset == call.block_size) {
                offset = 0;
                if (++index > first && index <= last) block = find(index);
            }
            if (t % W == 0) tile.k[t / W] = units(block, call.k_offset) + offset;
            tile.v[t / F::PAIR] = units(block, call.v_offset) + offset / F::PAIR * call.head_dim;
            offset += F::PAIR;
        }
        return tile;
    }

    // Makes whole vectors of tokens where W does not divide the block size: [dim units, TILE]. Tokens that nobody of
    // the panel sees keep what was there.
    void copy_k(int head, int64_t start, uint32_t *to, Tile<F> &tile) const {
        const int64_t dim_units = call.head_dim / F::PAIR, size = call.block_size;
        const int end = panel.in_tile(panel.all_end(), start);
        for (int t = panel.in_tile(panel.all_begin(), start); t < end; t++) {
            const int64_t token = start + t;
            const uint32_t *k = units(find(token / size), call.k_offset) + head * head_units() + token % size;
            for (int64_t d = 0; d < dim_units; d++) to[d * TILE + t] = k[d * size];
        }
        for (int g = 0; g < GROUPS; g++) tile.k[g] = to + g * W;
        tile.k_stride = TILE;
    }

  private:
    const uint8_t *find(int64_t index) const {
        return call.pool + call.block_tables[panel.sequence * call.table_stride + index] * call.block_bytes;
    }
    const uint32_t *units(const uint8_t *block, int64_t offset) const {
        return reinterpret_cast<const uint32_t *>(block + offset) + panel.kv_head * head_units();
    }
};

// One thread's work: the walk over splits and tiles, and the softmax.
template <class Engine>
class Worker {
    using F = typename Engine::Format;

    const AttentionCall &call;
    const int64_t width;
    const float factor;  // from what `weigh` finds in `scores` to exponents of 2
    Engine engine;
    float *scores, *next_max, *rescale;
    uint32_t *weights, *numbers;
    Sums split_sums;

  public:
    Sums sums;  // for a panel that this thread works on alone

    static int64_t width_of(const AttentionCall &call) { return round_up(call.head_dim, W); }
    static int64_t floats(const AttentionCall &call, int rows) {
        const int64_t padded = round_up(rows, 16), width = width_of(call);
        return Engine::floats(call, rows) + 2 * Scratch::size<float>(padded * TILE) +
               2 * Scratch::size<float>(padded + W) + Scratch::size<float>(width + W) + 2 * Sums::floats(rows, width);
    }

    Worker(const AttentionCall &call, Scratch scratch, int rows)
        : call(call),
          width(width_of(call)),
          factor((call.softcap ? call.softcap : call.scale) * LOG2_E),
          engine(call, scratch, rows) {
        const int64_t padded = round_up(rows, 16);
        scratch.memory += Engine::floats(call, rows);
        scores = scratch.take<float>(padded * TILE);
        weights = scratch.take<uint32_t>(padded * TILE);
        next_max = scratch.take<float>(padded + W);
        rescale = scratch.take<float>(padded + W);
        numbers = scratch.take<uint32_t>(width + W);
        sums = Sums::in(scratch, rows, width);
        scratch.memory += Sums::floats(rows, width);
        split_sums = Sums::in(scratch, rows, width);
    }

    // The panel's rows over splits [first, last), merged into `total`.
    void attend(const Panel &panel, int64_t first, int64_t last, const Sums &total) {
        engine.gather_q(panel);
        attend_split(panel, first, total);
        for (int64_t split = first + 1; split < last; split++) {
            attend_split(panel, split, split_sums);
            panel.merge(total, split_sums, split);
        }
    }

    void write(const Panel &panel, const Sums &total) const {
        for (int row = 0; row < panel.all_rows(); row++) {
            const int r = row % panel.rows;
            const int64_t head = (panel.kv_head + row / panel.rows) * call.group() + panel.first_head + r % panel.heads;
            const int64_t out = ((panel.token + r / panel.heads) * call.heads + head) * call.head_dim;
            if (call.sinks) total.join(call.sinks[head] * LOG2_E, row);
            const Vec weight = splat(sum_of(load(total.weight + row * W)));
            for (int64_t d = 0; d < width; d += F::PAIR * W) {
                Vec part[F::PAIR];
                for (int i = 0; i < F::PAIR; i++) {
                    const int64_t at = least(d + i * W, width - W);
                    part[i] = div(load(total.values + row * width + at), weight);
                }
                F::pack(numbers + d / F::PAIR, part);
            }
            memcpy(static_cast<typename F::Number *>(call.out) + out, numbers,
                   call.head_dim * sizeof(typename F::Number));
        }
    }

  private:
    void attend_split(const Panel &panel, int64_t split, const Sums &total) {
        const Pages<F> pages(call, panel);
        const int64_t first_tile = panel.first_tile(), end = least(panel.all_end(), (split + 1) * SPLIT);
        const int64_t begin = split * SPLIT < first_tile ? first_tile : split * SPLIT;
        const bool streaming = panel.rows <= STREAMING_ROWS;
        total.reset(panel.all_rows());
        Tile<F> tile = pages.at(begin);
        for (int64_t start = begin; start < end; start += TILE) {
            const Tile<F> next = start + TILE < end ? pages.at(start + TILE) : tile;
            const int first = panel.first_row(start), end_row = panel.end_row(start + TILE);
            for (int head = 0; head < panel.kv_heads; head++) {
                Tile<F> mine = tile.moved(head * pages.head_units());
                const Tile<F> ahead = head + 1 < panel.kv_heads ? tile.moved((head + 1) * pages.head_units()) : next;
                const Sums rows = total.from_row(head * panel.rows);
                engine.prepare(pages, head, start, mine);
                engine.score(panel, head, mine, streaming ? &ahead : nullptr, scores);
                int last = end_row, block = block_start(first, last);
                weigh(panel, start, block, last, rows);
                while (block > first) {
                    const int next_block = block_start(first, block);
                    weigh(panel, start, next_block, block, rows);
                    engine.add(panel, start, block, last, mine, nullptr, weights, rescale, rows.values);
                    last = block, block = next_block;
                }
                engine.add(panel, start, block, last, mine, streaming ? &ahead : nullptr, weights, rescale,
                           rows.values);
            }
            tile = next;
        }
    }

    // Where the last block of rows [first, last) starts; the first block may be a short one.
    static int block_start(int first, int last) { return (last - 1 - first) / Engine::BLOCK * Engine::BLOCK + first; }

    void weigh(const Panel &panel, int64_t start, int first, int last, const Sums &rows) {
        if (call.softcap) cap(first, last);
        panel.all_see_tile(start) ? weigh<true>(panel, start, first, last, rows)
                                  : weigh<false>(panel, start, first, last, rows);
    }

    // Scores of rows [first, last) to tanh(score x scale / softcap).
    void cap(int first, int last) {
        const Vec inner = splat(call.scale / call.softcap);
        for (float *score = scores + first * TILE; score < scores + last * TILE; score += W)
            store(score, tanh_of(mul(load(score), inner)));
    }

    // Scores to weights for rows [first, last) of a head: new maxima, factors to rescale by, and sums of weights.
    // WHOLE: the rows see all of the tile.
    template <bool WHOLE>
    void weigh(const Panel &panel, int64_t start, int first, int last, const Sums &rows) {
        const Vec scale = splat(factor);
        for (int r = first; r < last; r += 4) {
            Vec top[4];
            for (int i = 0; i < 4; i++) {
                const int row = least(r + i, last - 1);
                float *score = scores + row * TILE;
                if (!WHOLE) hide(score, panel.begin_in_tile(row, start), panel.end_in_tile(row, start));
                top[i] = load(score);
                for (int g = 1; g < GROUPS; g++) top[i] = max(top[i], load(score + g * W));
            }
            max_of_each(top, next_max + r);
        }
        for (int r = first; r < last; r += W) {  // rows from `last` on get numbers that nobody reads
            const Vec old_max = load(rows.maximum + r), new_max = max(old_max, mul(load(next_max + r), scale));
            store(rescale + r, exp2_negative(sub(old_max, new_max)));
            store(next_max + r, new_max);
        }
        for (int r = first; r < last; r++) {
            const Vec top = splat(-next_max[r]);
            Vec weight[GROUPS];
            for (int g = 0; g < GROUPS; g++)
                weight[g] = exp2_negative(fma(load(scores + r * TILE + g * W), scale, top));
            F::pack(weights + r * Tile<F>::V_ROWS, weight);
            Vec sum = weight[0];
            for (int g = 1; g < GROUPS; g++) sum = add(sum, weight[g]);
            store(rows.weight + r * W, fma(load(rows.weight + r * W), splat(rescale[r]), sum));
            rows.maximum[r] = next_max[r];
        }
    }

    // All but the scores [begin, end) become -inf.
    static void hide(float *score, int begin, int end) {
        for (int t = 0; t < begin; t++) score[t] = -INFINITY;
        for (int g = 0; g < GROUPS; g++) store(score + g * W, keep_first(load(score + g * W), end - g * W));
    }
};

}  // namespace
