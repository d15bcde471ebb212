// What attention walks over: the arguments of a call, panels of rows, and where the tiles of their pages lie.

#pragma once

#include <cstdlib>
#include <initializer_list>

#include "formats.h"
#include "kv_format.h"
#include "parallel.h"

// Where K or V of a layer lies in a block: offsets in bytes, negative where there is nothing.
struct AttentionHalf {
    KvFormat format;
    int64_t codes, scales, zeros;
    const float *signs;  // [head_dim] of the rotation, or null: not rotated
    const float *channels;  // [kv_heads, head_dim]: by what K or V was divided before it was rotated, or null
};

// The arguments of an entry. Strides in elements, offsets in bytes.
struct AttentionCall {
    const void *q;  // [T, heads, head_dim], dense inside a row
    KvFormat numbers;  // of q and out: BF16 or FP32
    int64_t q_stride;  // between rows
    const uint8_t *pool;  // [blocks, block_bytes]
    int64_t block_bytes;
    AttentionHalf k, v;
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

#if defined(__AVX512F__)
constexpr int TILE = 64;
#else
constexpr int TILE = 32;
#endif
constexpr int SPLIT = 512;
constexpr int64_t NO_WINDOW = INT32_MAX;  // tokens: no sequence has more
constexpr int GROUPS = TILE / W;  // vectors of tokens in a tile
constexpr int PANEL_ROWS = 192;  // most rows of a panel
constexpr int SMALL_PANEL_ROWS = 128;  // where there are few panels for many threads
constexpr int NARROW_DIMS = 64;  // most dims of a head whose K and V of a tile stay in the smallest cache
constexpr float LOG2_E = 1.44269504f;
constexpr int STREAMING_ROWS = 32;  // with so few rows a key/value head, memory is what takes the time

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
    // The next `floats` of it.
    Scratch part(int64_t floats) {
        memory += floats;
        return {memory - floats};
    }
    template <class T>
    static int64_t size(int64_t count) {
        return round_up(count * static_cast<int64_t>(sizeof(T)), 64) / 4;
    }
};

// Rows that walk pages together: for each of `kv_heads` key/value heads `rows` rows, these being query heads
// [first_head, first_head + heads) of the head's group, of `tokens` tokens from `token` on, token by token. The tokens
// are of one sequence; or, where `shared` is not 0, each is the last one of its sequence, `sequence` being the first of
// these, and they walk the first `shared` tokens, a multiple of SPLIT, which have the same pages in all of them.
struct Panel {
    int64_t sequence, kv_head, token, first_head;
    int kv_heads, heads, tokens, rows;
    int64_t seen;  // where the sight of the first token's rows ends; each further token sees one more
    int64_t window;
    int64_t shared = 0;

    // The rows of token i, which see `seen` tokens of their own sequence.
    Panel alone(int i, int64_t seen) const {
        return {sequence + i, kv_head, token + i, first_head, kv_heads, heads, 1, heads, seen, window};
    }
    int all_rows() const { return rows * kv_heads; }
    int64_t kv_head_of(int row) const { return kv_head + row / rows; }
    // The row's query head, of `group` for each key/value head, and its token.
    int64_t head_of(int row, int64_t group) const { return kv_head_of(row) * group + first_head + row % rows % heads; }
    int64_t token_of(int row) const { return token + row % rows / heads; }
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
    int64_t cost() const { return all_rows() * ceil_div(all_end() - first_tile(), TILE); }
};

// Tokens of a tile that lie side by side in a block, wherever the tile begins.
inline int64_t run_of(int64_t block_size) { return least<int64_t>(block_size & -block_size, TILE); }

// How K or V lies in a block, in bytes.
struct HalfLayout {
    int64_t head;  // from one head to the next
    int64_t rows;  // of K: dims, or pairs of dims
    int64_t k_token, k_row;  // of K: from one token to the next, from a dim, or pair of dims, to the next
    int64_t v_row;  // of V: from a token, or pair of tokens, to the next
    int v_shift;  // log2 of the tokens in such a row
    int64_t groups;  // of dims, each with a scale

    HalfLayout(const AttentionHalf &half, int64_t head_dim, int64_t block_size) {
        const bool wide = half.format == KvFormat::FP32, nibbles = half.format == KvFormat::INT4;
        const bool pairs = half.format == KvFormat::BF16 || half.format == KvFormat::FP16;
        k_token = wide || pairs ? 4 : 1;
        k_row = k_token * block_size;
        rows = pairs || nibbles ? head_dim / 2 : head_dim;
        head = rows * k_row;
        v_shift = pairs;
        v_row = (head / block_size) << v_shift;
        groups = nibbles ? head_dim / INT4_GROUP : 1;
    }
};

// Where a tile is stored, for the panel's first key/value head: of each W tokens K of the first one, and from where
// offsets of scales count; of each token unit the row of V. Tokens outside of the panel's blocks are found in the
// nearest one: readable, not seen. K and scales are whole vectors only where W divides the block size.
template <class F>
struct Stored {
    const uint8_t *k[GROUPS], *v[TILE / F::PAIR], *scales[GROUPS];
};

// A tile as an engine multiplies it: K as GROUPS vectors of W tokens, `k_stride` units from one dim unit to the next; V
// by token units.
template <class F>
struct Tile {
    static constexpr int V_ROWS = TILE / F::PAIR;
    const uint32_t *k[GROUPS], *v[V_ROWS];
    int64_t k_stride;
};

// Finds tiles in the pages of one panel.
template <class F>
struct Pages {
    const AttentionCall &call;
    const Panel &panel;
    const HalfLayout k, v;
    const int64_t first, last;  // blocks of the sequence that hold a token which any row sees

    Pages(const AttentionCall &call, const Panel &panel)
        : call(call),
          panel(panel),
          k(call.k, call.head_dim, call.block_size),
          v(call.v, call.head_dim, call.block_size),
          first(panel.all_begin() / call.block_size),
          last((panel.all_end() - 1) / call.block_size) {}

    Stored<F> at(int64_t start) const {
        Stored<F> stored;
        const int64_t k_codes = call.k.codes + panel.kv_head * k.head, v_codes = call.v.codes + panel.kv_head * v.head;
        int64_t index = start / call.block_size, offset = start % call.block_size;
        const uint8_t *block = find(index < first ? first : index);
        for (int t = 0; t < TILE; t += F::PAIR) {
            if (offset == call.block_size) {
                offset = 0;
                if (++index > first && index <= last) block = find(index);
            }
            if (t % W == 0) {
                stored.k[t / W] = block + k_codes + offset * k.k_token;
                stored.scales[t / W] = block + offset * sizeof(uint16_t);
            }
            stored.v[t / F::PAIR] = block + v_codes + (offset >> v.v_shift) * v.v_row;
            offset += F::PAIR;
        }
        return stored;
    }

    // Makes whole vectors of tokens where W does not divide the block size, of what lies in `rows` rows of Ts from
    // `codes` on in each block: [rows, TILE]. Blocks of which nobody of the panel sees anything are not read: what was
    // there stays.
    template <class T>
    void gather(int64_t codes, int64_t start, int64_t rows, T *to) const {
        const int64_t run = run_of(call.block_size);
        if (run == 8) return gather<T, 8>(codes, start, rows, to);
        run == 4 ? gather<T, 4>(codes, start, rows, to) : gather<T, 2>(codes, start, rows, to);
    }

  private:
    // By runs of tokens that lie side by side.
    template <class T, int RUN>
    void gather(int64_t codes, int64_t start, int64_t rows, T *to) const {
        const int end = panel.in_tile(panel.all_end(), start);
        for (int t = panel.in_tile(panel.all_begin(), start) / RUN * RUN; t < end; t += RUN) {
            const int64_t token = start + t, size = call.block_size;
            const T *from = reinterpret_cast<const T *>(find(token / size) + codes) + token % size;
            for (int64_t row = 0; row < rows; row++) memcpy(to + row * TILE + t, from + row * size, RUN * sizeof(T));
        }
    }

    const uint8_t *find(int64_t index) const {
        return call.pool + call.block_tables[panel.sequence * call.table_stride + index] * call.block_bytes;
    }
};

}  // namespace
