// Divides a call into work items for threads. Nothing here touches a result: items are whole panels, or single splits
// of a panel, and splits are merged in order by whoever finishes a panel's last one.

#pragma once

#include <cstring>

#include "attention.h"

namespace {

// Tokens, a multiple of SPLIT, that two sequences with one row each have in the same pages from the start.
inline int64_t shared_tokens(const AttentionCall &call, int64_t a, int64_t b) {
    int64_t tokens = 0, shorter = INT32_MAX;
    for (const int64_t i : {a, b}) {
        if (call.query_start[i + 1] - call.query_start[i] != 1 || call.seq_lens[i] > call.window) return 0;
        shorter = least<int64_t>(shorter, call.seq_lens[i]);
    }
    const int32_t *const of_a = call.block_tables + a * call.table_stride;
    const int32_t *const of_b = call.block_tables + b * call.table_stride;
    for (int64_t block = 0; tokens + SPLIT < shorter; tokens += SPLIT) {
        const int64_t end = ceil_div(tokens + SPLIT, call.block_size);
        if (memcmp(of_a + block, of_b + block, sizeof(int32_t) * (end - block))) break;
        block = end;
    }
    return tokens;
}

// Sequences whose rows may share panels: [first, end), and the tokens that they share, 0 for a single one.
struct Company {
    int64_t first, end, shared = 0;

    Company(const AttentionCall &call, int64_t first) : first(first), end(first + 1) {
        if (end < call.sequences) shared = shared_tokens(call, first, end);
        while (shared && end < call.sequences && shared_tokens(call, first, end) >= shared) end++;
    }
};

// Calls visit(panel) for every panel of the batch; within a sequence head by head, since one head's K and V may stay in
// the second cache, and of a head the longest ones first. `group_heads`: panels of few rows walk several key/value
// heads, which lie side by side in a page.
template <class Visit>
void for_each_panel(const AttentionCall &call, int64_t panel_rows, bool group_heads, Visit visit) {
    const int64_t group = call.group(), heads = least(group, panel_rows);
    for (int64_t b = 0; b < call.sequences;) {
        const Company company(call, b);
        b = company.end;
        const int64_t first = call.query_start[company.first], last = call.query_start[company.end];
        const int64_t tokens = least(last - first, panel_rows / heads);  // of a panel
        if (tokens <= 0) continue;
        const int64_t kv_heads = group_heads ? panel_rows / (tokens * heads) : 1;
        for (int64_t kv = 0; kv < call.kv_heads; kv += kv_heads)
            for (int64_t head = 0; head < group; head += heads)
                for (int64_t chunk = ceil_div(last - first, tokens) - 1; chunk >= 0; chunk--) {
                    const int64_t token = first + chunk * tokens, count = least(tokens, last - token);
                    const int64_t width = least(heads, group - head), shared = company.shared;
                    visit(Panel{shared ? company.first + chunk * tokens : company.first, kv, token, head,
                                static_cast<int>(least(kv_heads, call.kv_heads - kv)), static_cast<int>(width),
                                static_cast<int>(count), static_cast<int>(width * count),
                                shared ? shared : call.seq_lens[company.first] - (last - token) + 1,
                                shared ? NO_WINDOW : call.window, shared});
                }
    }
}

// Calls visit(part, split) for every split of a panel: of the panel itself, or, beyond what its tokens share, of each
// token alone. In the order in which a row's sums are merged.
template <class Visit>
void for_each_split(const AttentionCall &call, const Panel &panel, Visit visit) {
    const int64_t end = panel.shared ? panel.shared / SPLIT : panel.end_split();
    for (int64_t split = panel.first_split(); split < end; split++) visit(panel, split);
    for (int i = 0; panel.shared && i < panel.tokens; i++) {
        const Panel alone = panel.alone(i, call.seq_lens[panel.sequence + i]);
        for (int64_t split = end; split < alone.end_split(); split++) visit(alone, split);
    }
}

// How a call is divided: whole panels, except those that would keep one thread busy long after the others have ended,
// and those that share only what they begin with.
struct Division {
    static constexpr int64_t ITEMS_PER_THREAD = 4;
    static constexpr int64_t DIMS_PER_THREAD = 1 << 14;  // x rows x tiles; for less a thread is not worth waking

    const AttentionCall &call;
    const int64_t width;
    int64_t items = 0, divided_panels = 0, sums_floats = 0;  // sums_floats: of all splits of divided panels
    int64_t largest_whole = 0;  // cost of the largest panel that stays whole
    int64_t panel_rows = 0;  // most rows of a panel
    int threads = 1, rows = 0;  // rows: of the largest panel
    bool group_heads = true;

    Division(const AttentionCall &call, int64_t width) : call(call), width(width) {
        int64_t all = 0, splits = 0, panels = 0;
        const auto count = [&](int64_t rows) {
            panel_rows = rows;
            all = splits = panels = 0;
            for_each_panel(call, rows, true, [&](const Panel &panel) {
                all += cost(panel), panels++;
                for_each_split(call, panel, [&](const Panel &, int64_t) { splits++; });
            });
            threads = static_cast<int>(least(octavo_threads(), all * call.head_dim / DIMS_PER_THREAD + 1));
        };
        count(PANEL_ROWS);
        if (threads > 1 && panels < threads * ITEMS_PER_THREAD) count(SMALL_PANEL_ROWS);
        group_heads = threads == 1 || splits >= threads * ITEMS_PER_THREAD;
        largest_whole = threads == 1 ? all : all / (threads * ITEMS_PER_THREAD);
        for_each_panel(call, panel_rows, group_heads, [&](const Panel &panel) {
            rows = rows < panel.all_rows() ? panel.all_rows() : rows;
            items += !divides(panel);
            if (!divides(panel)) return;
            divided_panels++;
            for_each_split(call, panel, [&](const Panel &part, int64_t) { items++, sums_floats += floats(part); });
        });
    }

    int64_t cost(const Panel &panel) const {
        if (!panel.shared) return panel.cost();
        int64_t sum = 0;
        for_each_split(call, panel, [&](const Panel &part, int64_t) { sum += part.all_rows() * (SPLIT / TILE); });
        return sum;
    }
    bool divides(const Panel &panel) const {
        return panel.shared || (panel.end_split() - panel.first_split() > 1 && panel.cost() > largest_whole);
    }
    int64_t floats(const Panel &part) const { return Sums::floats(part.all_rows(), width); }
};

// A panel of which several threads work on splits.
struct Divided {
    Panel panel;
    Scratch sums;  // of its splits, in order
    int splits_left;  // how many are not summed yet
};

// A panel's work, whole or one split of it.
struct Item {
    Panel panel;
    int64_t split;
    Scratch sums;
    Divided *divided;  // null: the whole panel
};

template <class Engine>
class Batch {
    using F = typename Engine::Format;

    const AttentionCall &call;
    const int64_t width;
    const Division division;
    const int64_t worker_floats;
    void *const memory;
    Item *items;
    Divided *divided;
    Scratch sums, workers;
    int next = 0;

  public:
    explicit Batch(const AttentionCall &call)
        : call(call),
          width(Worker<Engine>::width_of(call)),
          division(call, width),
          worker_floats(Worker<Engine>::floats(call, division.rows)),
          memory(aligned_alloc(64, sizeof(float) * (Scratch::size<Item>(division.items) +
                                                    Scratch::size<Divided>(division.divided_panels) +
                                                    division.sums_floats + worker_floats * division.threads))) {
        if (!memory) return;
        Scratch scratch{static_cast<float *>(memory)};
        items = scratch.take<Item>(division.items);
        divided = scratch.take<Divided>(division.divided_panels);
        sums = scratch.part(division.sums_floats);
        workers = scratch.part(worker_floats * division.threads);
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
        Divided *parts = divided;
        Scratch left = sums;
        for_each_panel(call, division.panel_rows, division.group_heads, [&](const Panel &panel) {
            if (!division.divides(panel)) {
                *item++ = {panel, 0, {nullptr}, nullptr};
                return;
            }
            *parts = {panel, left, 0};
            for_each_split(call, panel, [&](const Panel &part, int64_t split) {
                *item++ = {part, split, left.part(division.floats(part)), parts};
                parts->splits_left++;
            });
            parts++;
        });
    }

    void work(Worker<Engine> &worker, const Item &item) {
        const Panel &panel = item.panel;
        if (!item.divided) {
            worker.attend(panel, panel.first_split(), panel.end_split(), worker.sums);
            worker.write(panel, worker.sums);
            return;
        }
        worker.attend(panel, item.split, item.split + 1, Sums::in(item.sums, panel.all_rows(), width));
        if (!__atomic_sub_fetch(&item.divided->splits_left, 1, __ATOMIC_ACQ_REL)) finish(worker, *item.divided);
    }

    // All splits are summed.
    void finish(const Worker<Engine> &worker, const Divided &parts) const {
        const Sums total = Sums::in(parts.sums, parts.panel.all_rows(), width);
        Scratch rest = parts.sums;
        bool is_first = true;
        for_each_split(call, parts.panel, [&](const Panel &part, int64_t split) {
            const Sums next = Sums::in(rest.part(division.floats(part)), part.all_rows(), width);
            if (!is_first) total.merge(parts.panel, part, next, split);
            is_first = false;
        });
        worker.write(parts.panel, total);
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
