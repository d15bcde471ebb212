// Paged attention: one arithmetic for every row, whatever the batch, the chunk, the place or the number of threads.
//
// A row is one query head of one token; it sees the first `seen` tokens of its sequence, or the last `window` of those.
// Its result is defined by
//
//     tiles   of TILE tokens at absolute positions: raw scores (q . k), their maximum, one rescale of what was summed
//             so far, weights exp2(score x scale x log2 e - maximum), rounded to the format, weights x V
//     splits  of 512 tokens at absolute positions: each starts afresh; (maximum, sum, values) are merged in order
//     sinks   one logit a query head: at the very end it joins the row's maximum and sum
//
// and the order in which an engine adds products inside a tile. With a softcap, softcap x tanh(score x scale / softcap)
// takes the place of score x scale. The sums begin at the first tile and split that hold a token the row sees. Tokens
// that a row does not see add nothing to it, whatever their slots hold; pages of which no row of a panel sees anything
// are not read, nor are their entries of the block table. Everything else here only decides which rows share a loaded
// tile (all query heads of a key/value head; in prefill those of several tokens too; in decode those of sequences that
// begin with the same pages) and which thread computes what. Pages are read in place.
//
// The format is that in which the engine multiplies, bf16 or fp32. K and V of other formats become numbers of it a tile
// at a time (kv_decode.h), queries and results a row at a time (attention_rows.h). A token's scale of K multiplies its
// score, that of V its weight once it has been summed and before it is rounded.
//
// An engine does the products: `VectorEngine` (attention_vector.h) or `AmxEngine` (attention_amx.cpp). It has
//
//     Format, Engine(call, scratch, rows), floats(call, rows): the size of its scratch memory
//     gather_q(panel, rows)               keeps the panel's queries in its own order
//     prepare(pages, head, start, tile)   copies what it cannot use where it lies, and points the tile at the copies
//     score(panel, head, first, last, tile, ahead, to)
//                                         scores [rows, TILE] of one key/value head, of rows [first, last) and up to
//                                         SLACK more
//     add(panel, start, first, last, tile, ahead, weights, rescale, values)
//                                         values = values x rescale + weights x V, for rows [first, last) of the head:
//                                         blocks of BLOCK rows, the last block first, while others' weights are made
//     ABREAST, score_parts(call), add_parts(call)
//                                         what `Ahead` (attention_ahead.h) wants to know; the engine calls its score()
//                                         and add() so many times

#pragma once

#include "attention_rows.h"
#include "kv_decode.h"

namespace {

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
        for (int r = 0; r < rows + W; r++) maximum[r] = -INFINITY;  // whole vectors are worked on
        memset(weight, 0, sizeof(float) * rows * W);
        memset(values, 0, sizeof(float) * rows * width);
    }

    // This one row = the next one.
    void adopt(const Sums &next) const {
        maximum[0] = next.maximum[0];
        memcpy(weight, next.weight, sizeof(float) * W);
        memcpy(values, next.values, sizeof(float) * width);
    }

    // This one row = row (+) the next one.
    void merge(const Sums &next) const {
        const float top = larger(maximum[0], next.maximum[0]);
        const Vec a = exp2_negative(splat(maximum[0] - top)), b = exp2_negative(splat(next.maximum[0] - top));
        store(weight, fma(load(next.weight), b, mul(load(weight), a)));
        for (int64_t d = 0; d < width; d += W)
            store(values + d, fma(load(next.values + d), b, mul(load(values + d), a)));
        maximum[0] = top;
    }

    // The panel's rows = rows (+) next, what those of `part`, the panel or one token of it, see of a split.
    void merge(const Panel &panel, const Panel &part, const Sums &next, int64_t split) const {
        const int64_t from = split * SPLIT, offset = (part.token - panel.token) * panel.heads;
        for (int head = 0; head < panel.kv_heads; head++)
            for (int r = part.first_row(from); r < part.end_row(from + SPLIT); r++) {
                const Sums row = from_row(head * panel.rows + offset + r), more = next.from_row(head * part.rows + r);
                part.begin(r) < from ? row.merge(more) : row.adopt(more);
            }
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

// One thread's work: the walk over splits and tiles, and the softmax.
template <class Engine>
class Worker {
    using F = typename Engine::Format;

    const AttentionCall &call;
    const int64_t width;
    const bool narrow;  // K and V of a tile fit into the smallest cache together
    const float factor;  // from what `weigh` finds in `scores` to exponents of 2
    Engine engine;
    Decoder<F> decoder;
    Ahead<F> ahead;
    ModelRows<F> model_rows;
    float *scores, *next_max, *rescale;
    uint32_t *weights;
    Sums split_sums;

  public:
    Sums sums;  // for a panel that this thread works on alone

    static int64_t width_of(const AttentionCall &call) { return round_up(call.head_dim, W); }
    static int64_t floats(const AttentionCall &call, int rows) {
        const int64_t padded = round_up(rows, 16), width = width_of(call);
        return Engine::floats(call, rows) + Decoder<F>::floats(call) + ModelRows<F>::scratch_floats(call) +
               2 * Scratch::size<float>((padded + Engine::SLACK) * TILE) + 2 * Scratch::size<float>(padded + W) +
               2 * Sums::floats(rows, width);
    }

    Worker(const AttentionCall &call, Scratch scratch, int rows)
        : call(call),
          width(width_of(call)),
          narrow(call.head_dim <= NARROW_DIMS),
          factor((call.softcap ? call.softcap : call.scale) * LOG2_E),
          engine(call, scratch.part(Engine::floats(call, rows)), rows),
          decoder(call, scratch.part(Decoder<F>::floats(call))),
          ahead(call,
                {Decoder<F>::k_parts(call), Decoder<F>::v_parts(), Engine::score_parts(call), Engine::add_parts(call)},
                Engine::ABREAST),
          model_rows(call, scratch.part(ModelRows<F>::scratch_floats(call))) {
        const int64_t padded = round_up(rows, 16);
        scores = scratch.take<float>((padded + Engine::SLACK) * TILE);
        weights = scratch.take<uint32_t>(padded * TILE);
        next_max = scratch.take<float>(padded + W);
        rescale = scratch.take<float>(padded + W);
        memset(next_max, 0, sizeof(float) * (padded + W));  // of rows that are not there: subnormal numbers take long
        sums = Sums::in(scratch.part(Sums::floats(rows, width)), rows, width);
        split_sums = Sums::in(scratch, rows, width);
    }

    // The panel's rows over splits [first, last), merged into `total`.
    void attend(const Panel &panel, int64_t first, int64_t last, const Sums &total) {
        engine.gather_q(panel, model_rows);
        ahead.enter(panel);
        const int64_t end = least(panel.all_end(), last * SPLIT);
        attend_split(panel, first, end, total);
        for (int64_t split = first + 1; split < last; split++) {
            attend_split(panel, split, end, split_sums);
            total.merge(panel, panel, split_sums, split);
        }
    }

    void write(const Panel &panel, const Sums &total) const {
        for (int row = 0; row < panel.all_rows(); row++) {
            if (call.sinks) total.join(call.sinks[panel.head_of(row, call.group())] * LOG2_E, row);
            const Vec weight = splat(sum_of(load(total.weight + row * W)));
            model_rows.write(panel, row, total.values + row * width, weight);
        }
    }

  private:
    // end: where the walk ends, perhaps in a later split.
    void attend_split(const Panel &panel, int64_t split, int64_t end, const Sums &total) {
        const Pages<F> pages(call, panel);
        const int64_t first_tile = panel.first_tile(), split_end = least(end, (split + 1) * SPLIT);
        const int64_t begin = split * SPLIT < first_tile ? first_tile : split * SPLIT;
        const bool streaming = panel.rows <= STREAMING_ROWS;
        total.reset(panel.all_rows());
        Stored<F> stored = pages.at(begin);
        for (int64_t start = begin; start < split_end; start += TILE) {
            const bool more = start + TILE < end;
            const Stored<F> next = more ? pages.at(start + TILE) : stored;
            const int first = panel.first_row(start), end_row = panel.end_row(start + TILE);
            for (int head = 0; head < panel.kv_heads; head++) {
                const Sums rows = total.from_row(head * panel.rows);
                const bool last_head = head + 1 == panel.kv_heads;
                const Stored<F> *const ahead_at = !last_head ? &stored : more ? &next : nullptr;
                ahead.begin(streaming ? ahead_at : nullptr, last_head ? 0 : head + 1);
                Tile<F> tile = decoder.tile(pages, stored, head, start, ahead);
                engine.prepare(pages, head, start, tile);
                int last = end_row, block = block_start(first, last);
                engine.score(panel, head, narrow ? block : first, last, tile, ahead, scores);
                weigh(panel, start, block, last, rows);
                while (block > first) {
                    const int next_block = block_start(first, block);
                    if (narrow) engine.score(panel, head, next_block, block, tile, ahead, scores);
                    weigh(panel, start, next_block, block, rows);
                    engine.add(panel, start, block, last, tile, ahead, weights, rescale, rows.values);
                    last = block, block = next_block;
                }
                engine.add(panel, start, block, last, tile, ahead, weights, rescale, rows.values);
                ahead.end();
            }
            stored = next;
        }
    }

    // Where the last block of rows [first, last) starts; the first block may be a short one.
    static int block_start(int first, int last) { return (last - 1 - first) / Engine::BLOCK * Engine::BLOCK + first; }

    void weigh(const Panel &panel, int64_t start, int first, int last, const Sums &rows) {
        if (call.softcap) cap(first, last);
        if (decoder.scales_tokens)
            panel.all_see_tile(start) ? weigh<true, true>(panel, start, first, last, rows)
                                      : weigh<false, true>(panel, start, first, last, rows);
        else
            panel.all_see_tile(start) ? weigh<true, false>(panel, start, first, last, rows)
                                      : weigh<false, false>(panel, start, first, last, rows);
    }

    // Scores of rows [first, last) to tanh(score x scale / softcap).
    void cap(int first, int last) {
        const Vec inner = splat(call.scale / call.softcap);
        for (int r = first; r < last; r++)
            for (int t = 0; t < TILE; t += W) {
                float *score = scores + r * TILE + t;
                Vec x = load(score);
                if (decoder.scales_tokens) x = mul(x, load(decoder.k_scales() + t));
                store(score, tanh_of(mul(x, inner)));
            }
    }

    // Scores to weights for rows [first, last) of a head: new maxima, factors to rescale by, and sums of weights.
    // WHOLE: the rows see all of the tile. SCALED: tokens have scales.
    template <bool WHOLE, bool SCALED>
    void weigh(const Panel &panel, int64_t start, int first, int last, const Sums &rows) {
        Vec factors[GROUPS];  // from scores to exponents of 2
        for (int g = 0; g < GROUPS; g++)
            factors[g] = SCALED && !call.softcap ? mul(load(decoder.k_scales() + g * W), splat(factor)) : splat(factor);
        // The scales of tokens that a row does not see may be anything: `other` takes the place of what they made.
        const auto seen = [&](int row, int g, Vec v, float other) {
            if (WHOLE || !SCALED) return v;
            const int begin = panel.begin_in_tile(row, start), end = panel.end_in_tile(row, start);
            return between(begin - g * W, end - g * W, v, splat(other));
        };
        for (int r = first; r < last; r += W) {  // rows from `last` on get numbers that nobody reads
            const Vec next = max_of_each(last - r, [&](int i) {
                const int row = least(r + i, last - 1);
                float *score = scores + row * TILE;
                if (!WHOLE) hide(score, panel.begin_in_tile(row, start), panel.end_in_tile(row, start));
                Vec top;
                for (int g = 0; g < GROUPS; g++) {
                    const Vec x = SCALED ? mul(load(score + g * W), seen(row, g, factors[g], 1)) : load(score + g * W);
                    top = g ? max(top, x) : x;
                }
                return top;
            });
            const Vec old_max = load(rows.maximum + r);
            const Vec new_max = max(old_max, SCALED ? next : mul(next, splat(factor)));
            store(rescale + r, exp2_negative(sub(old_max, new_max)));
            store(next_max + r, new_max);
        }
        for (int r = first; r < last; r++) {
            const Vec top = splat(-next_max[r]);
            Vec weight[GROUPS];
            for (int g = 0; g < GROUPS; g++)
                weight[g] = F::weight_exp2(fma(load(scores + r * TILE + g * W), seen(r, g, factors[g], 1), top));
            Vec sum = weight[0];
            for (int g = 1; g < GROUPS; g++) sum = add(sum, weight[g]);
            for (int g = 0; SCALED && g < GROUPS; g++)
                weight[g] = seen(r, g, mul(weight[g], load(decoder.v_scales() + g * W)), 0);
            F::pack(weights + r * Tile<F>::V_ROWS, weight);
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
