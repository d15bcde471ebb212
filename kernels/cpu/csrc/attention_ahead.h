// Prefetches what the next key/value head, of this tile or the next one, needs, since the hardware follows no block
// table: in the order of addresses, as it does follow what runs upwards; and spread over the work on this head, as lines
// that are asked for in a row wait for each other.

#pragma once

#include "attention_pages.h"

namespace {

template <class F>
class Ahead {
    static constexpr int64_t LINE = 64;  // bytes
    static constexpr int EXPAND = 16, SCORE = 16, ADD = 16;  // shares of the work on a head
    enum Kind { K, V, SCALES };

    // Of a run of tokens of one head `count` lines, the first one `begin` bytes into a block, that of the next head
    // `head` bytes on. abreast: one line of each run in turns, as the engine reads them.
    struct Part {
        Kind kind;
        bool abreast;
        int64_t begin, head, count, stride;
    };

    const AttentionCall &call;
    const int64_t run;  // tokens of a tile that lie side by side
    int runs = 0;  // of a tile
    Part parts[6];
    int num_parts = 0;
    int64_t steps_a_head = 0;  // prefetches, or of what is abreast prefetches of one line of each run
    int64_t k_steps = 0, v_steps = 0, score_steps = 0, add_steps = 0;  // at a time
    int64_t first_head = 0, first_v = 0;  // of the panel, V's begin in a block

    const Stored<F> *tile = nullptr;
    int64_t head = 0;
    int64_t quota = 0;  // steps that are still to be made for it
    int part = 0, first_run = 0;  // that come next
    int lines_abreast = 0;
    const uint8_t *lines[TILE / 2];  // of the runs before
    int64_t at = 0, steps_left = 0, stride = 0;

  public:
    // How many parts the work on a head has: of expanding K and V, where they are, of the engine's `score` and `add`.
    struct Parts {
        int64_t k, v, score, add;
    };

    // abreast: whether the engine reads the blocks of a tile in turns, line by line.
    Ahead(const AttentionCall &call, const Parts &work, bool abreast)
        : call(call), run(run_of(call.block_size)) {
        if (run % W && run != call.block_size) return;
        runs = static_cast<int>(TILE / run);
        const HalfLayout k(call.k, call.head_dim, call.block_size), v(call.v, call.head_dim, call.block_size);
        const int64_t scales = call.block_size * sizeof(uint16_t), v_bytes = run * v.head / call.block_size;
        const bool expands_k = call.k.format != F::STORED, expands_v = call.v.format != F::STORED;
        add_part(K, abreast && !expands_k, call.k.codes, k.head, k.rows, k.k_row, run * k.k_token);
        add_part(V, abreast && !expands_v, call.v.codes, v.head, 1, v_bytes, v_bytes);
        for (const int64_t begin : {call.k.scales, call.k.zeros})
            add_part(SCALES, false, begin, k.groups * scales, k.groups, scales, run * sizeof(uint16_t));
        for (const int64_t begin : {call.v.scales, call.v.zeros})
            add_part(SCALES, false, begin, v.groups * scales, v.groups, scales, run * sizeof(uint16_t));
        const int64_t all = SCORE + ADD + EXPAND * (expands_k + expands_v);
        k_steps = ceil_div(steps_a_head * EXPAND, all * work.k);
        v_steps = ceil_div(steps_a_head * EXPAND, all * work.v);
        score_steps = ceil_div(steps_a_head * SCORE, all * work.score);
        add_steps = ceil_div(steps_a_head * ADD, all * work.add);
    }

    // The work on a panel begins.
    void enter(const Panel &panel) {
        first_head = panel.kv_head;
        first_v = call.v.codes + panel.kv_head * HalfLayout(call.v, call.head_dim, call.block_size).head;
    }

    // The work on a head begins, takes a step, and ends. next: the tile of the head to prefetch, or null.
    void begin(const Stored<F> *next, int next_head) {
        tile = next, head = next_head;
        quota = tile ? steps_a_head : 0;
        part = first_run = 0, steps_left = 0;
    }
    void expand_k() { if (quota) step(k_steps); }
    void expand_v() { if (quota) step(v_steps); }
    void score() { if (quota) step(score_steps); }
    void add() { if (quota) step(add_steps); }
    void end() { if (quota) step(quota); }
    bool prefetches() const { return quota; }

  private:
    // `rows` of `bytes`, `row` bytes from one to the next.
    void add_part(Kind kind, bool abreast, int64_t begin, int64_t head, int64_t rows, int64_t row, int64_t bytes) {
        if (begin < 0) return;
        const bool apart = row > LINE && bytes <= LINE;
        const int64_t count = apart ? rows : ceil_div(rows * row, LINE);
        parts[num_parts++] = {kind, abreast, begin, head, count, apart ? row : LINE};
        steps_a_head += abreast ? count : count * runs;
    }

    __attribute__((noinline)) void step(int64_t count) {
        count = least(count, quota);
        quota -= count;
        while (count) {
            if (!steps_left) next_lines();
            const int64_t some = least(count, steps_left);
            count -= some, steps_left -= some;
            if (lines_abreast == 1)
                for (int64_t i = 0; i < some; i++) prefetch(lines[0] + at + i * stride);
            else
                for (int64_t i = 0; i < some; i++)
                    for (int j = 0; j < lines_abreast; j++) prefetch(lines[j] + at + i * stride);
            at += some * stride;
        }
    }

    void next_lines() {
        const Part &next = parts[part];
        lines_abreast = next.abreast ? runs : 1;
        for (int i = 0; i < lines_abreast; i++) lines[i] = begin_of(next, (first_run + i) * run);
        at = 0, steps_left = next.count, stride = next.stride;
        first_run += lines_abreast;
        if (first_run == runs) first_run = 0, part++;
    }

    // Its lines for the run that begins at `token`.
    const uint8_t *begin_of(const Part &next, int64_t token) const {
        const uint8_t *const of_v = tile->v[token / F::PAIR];
        if (run == call.block_size) return of_v - first_v + next.begin + (first_head + head) * next.head;
        if (next.kind == SCALES) return tile->scales[token / W] + next.begin + (first_head + head) * next.head;
        return (next.kind == K ? tile->k[token / W] : of_v) + head * next.head;
    }
};

}  // namespace
