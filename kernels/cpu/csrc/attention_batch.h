// Divides a call into work items for threads. Nothing here touches a result: items are whole panels, or single splits
// of a panel, and splits are merged in order by whoever finishes a panel's last one.

#pragma once

#include "attention.h"

namespace {

// Calls visit(panel) for every panel of the batch; within a sequence the longest ones first. `group_heads`: panels of
// few rows walk several key/value heads, which lie side by side in a page.
template <class Visit>
void for_each_panel(const AttentionCall &call, int64_t panel_rows, bool group_heads, Visit visit) {
    const int64_t group = call.group(), heads = least(group, panel_rows);
    for (int64_t b = 0; b < call.sequences; b++) {
        const int64_t first = call.query_start[b], last = call.query_start[b + 1];
        const int64_t tokens = least(last - first, panel_rows / heads);  // of a panel
        if (tokens <= 0) continue;
        const int64_t kv_heads = group_heads ? panel_rows / (tokens * heads) : 1;
        for (int64_t chunk = ceil_div(last - first, tokens) - 1; chunk >= 0; chunk--)
            for (int64_t kv = 0; kv < call.kv_heads; kv += kv_heads)
                for (int64_t head = 0; head < group; head += heads) {
                    const int64_t token = first + chunk * tokens, count = least(tokens, last - token);
                    const int64_t width = least(heads, group - head);
                    visit(Panel{b, kv, token, head, static_cast<int>(least(kv_heads, call.kv_heads - kv)),
                                static_cast<int>(width), static_cast<int>(count), static_cast<int>(width * count),
                                call.seq_lens[b] - (last - token) + 1, call.window});
                }
    }
}

// How a call is divided: whole panels, except those that would keep one thread busy long after the others have ended.
struct Division {
    static constexpr int64_t ITEMS_PER_THREAD = 4;
    static constexpr int64_t DIMS_PER_THREAD = 1 << 14;  // x rows x tiles; for less a thread is not worth waking

    int64_t items = 0, divided_panels = 0, divided_splits = 0;
    int64_t largest_whole = 0;  // cost of the largest panel that stays whole
    int64_t panel_rows = 0;  // most rows of a panel
    int threads = 1, rows = 0;  // rows: of the largest panel
    bool group_heads = true;

    // expands: tiles of K or V are expanded, which serves all rows of a panel.
    Division(const AttentionCall &call, bool expands) {
        int64_t cost = 0, splits = 0, panels = 0;
        const auto count = [&](int64_t rows) {
            panel_rows = rows;
            cost = splits = panels = 0;
            for_each_panel(call, rows, true, [&](const Panel &panel) {
                cost += panel.cost(), splits += panel.splits(), panels++;
            });
            threads = static_cast<int>(least(octavo_threads(), cost * call.head_dim / DIMS_PER_THREAD + 1));
        };
        count(expands || call.head_dim > NARROW_DIMS ? PANEL_ROWS : NARROW_PANEL_ROWS);
        if (threads > 1 && panels < threads * ITEMS_PER_THREAD) count(NARROW_PANEL_ROWS);
        group_heads = threads == 1 || splits >= threads * ITEMS_PER_THREAD;
        largest_whole = threads == 1 ? cost : cost / (threads * ITEMS_PER_THREAD);
        for_each_panel(call, panel_rows, group_heads, [&](const Panel &panel) {
            rows = rows < panel.all_rows() ? panel.all_rows() : rows;
            items += divides(panel) ? panel.splits() : 1;
            divided_panels += divides(panel);
            divided_splits += divides(panel) ? panel.splits() : 0;
        });
    }

    bool divides(const Panel &panel) const { return panel.splits() > 1 && panel.cost() > largest_whole; }
};

// A panel's work, whole or one split of it.
struct Item {
    Panel panel;
    int64_t split;  // -1: all of them
    Scratch partial;  // sums of the panel's splits, one after the other
    int *splits_left;  // how many are not summed yet
};

template <class Engine>
class Batch {
    using F = typename Engine::Format;

    const AttentionCall &call;
    const Division division;
    const int64_t width, sums_floats, worker_floats;
    void *const memory;
    Item *items;
    int *splits_left;
    Scratch partials, workers;
    int next = 0;

  public:
    explicit Batch(const AttentionCall &call)
        : call(call),
          division(call, !Decoder<F>::in_place(call.k) || !Decoder<F>::in_place(call.v)),
          width(Worker<Engine>::width_of(call)),
          sums_floats(Sums::floats(division.rows, width)),
          worker_floats(Worker<Engine>::floats(call, division.rows)),
          memory(aligned_alloc(
              64, sizeof(float) * (Scratch::size<Item>(division.items) + Scratch::size<int>(division.divided_panels) +
                                   sums_floats * division.divided_splits + worker_floats * division.threads))) {
        if (!memory) return;
        Scratch scratch{static_cast<float *>(memory)};
        items = scratch.take<Item>(division.items);
        splits_left = scratch.take<int>(division.divided_panels);
        partials = {scratch.take<float>(sums_floats * division.divided_splits)};
        workers = {scratch.take<float>(worker_floats * division.threads)};
        list_items();
    }
    ~Batch() { free(memory); }

    bool ready() const { return memory != nullptr; }

    void run() {
        auto body = [&](int thread) {
            Worker<Engine> worker(call, {workers.memory + thread * worker_floats}, division.rows);
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
        int *left = splits_left;
        Scratch sums = partials;
        for_each_panel(call, division.panel_rows, division.group_heads, [&](const Panel &panel) {
            if (!division.divides(panel)) {
                *item++ = {panel, -1, {nullptr}, nullptr};
                return;
            }
            *left = static_cast<int>(panel.splits());
            for (int64_t split = panel.first_split(); split < panel.end_split(); split++)
                *item++ = {panel, split, sums, left};
            left++;
            sums.memory += panel.splits() * sums_floats;
        });
    }

    Sums sums_of(const Item &item, int64_t split) const {
        return Sums::in({item.partial.memory + (split - item.panel.first_split()) * sums_floats}, division.rows, width);
    }

    void work(Worker<Engine> &worker, const Item &item) {
        const Panel &panel = item.panel;
        if (item.split < 0) {
            worker.attend(panel, panel.first_split(), panel.end_split(), worker.sums);
            worker.write(panel, worker.sums);
            return;
        }
        worker.attend(panel, item.split, item.split + 1, sums_of(item, item.split));
        if (__atomic_sub_fetch(item.splits_left, 1, __ATOMIC_ACQ_REL)) return;
        const int64_t first = panel.first_split();
        const Sums total = sums_of(item, first);
        for (int64_t split = first + 1; split < panel.end_split(); split++)
            total.merge(panel, sums_of(item, split), split);
        worker.write(panel, total);
    }
};

// 0: done; -1: no memory for scratch.
template <class Engine>
int32_t paged_attention(const AttentionCall &call) {
    Batch<Engine> batch(call);
    if (!batch.ready()) return -1;
    batch.run();
    return 0;
}

}  // namespace
