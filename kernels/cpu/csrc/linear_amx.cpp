// Linear layers on AMX tiles (bf16): 32 rows x 32 columns are summed up in four tile registers. A step takes in 32
// input dims: the tile multiply sums a step's even and odd dims apart and adds both to the accumulator (Intel SDM,
// TDPBF16PS).

#include "amx.h"
#include "linear_codes.h"

namespace {

constexpr int ROWS = 16, STEP = 32, UNITS = STEP / 2;  // of a tile: rows; bf16 numbers, units in one
constexpr int TILE_BYTES = 1024;
constexpr int PANEL = 2 * ROWS;
constexpr int SUPER_PANELS = 16, SUPER_BYTES = 768 << 10;  // packed together: about as much as the second cache keeps
constexpr int CHUNK = 10;  // steps of a block that stay in the first cache while many panels pass by
enum { C00, C01, C10, C11, A0, A1, B0, B1 };  // tile registers: C[half of the rows][half of the columns]

// Sums of a panel and block: tiles C00, C01, C10, C11.
struct Sums {
    alignas(64) float tile[4][ROWS * ROWS];
};

// Gives the upper and lower half of a panel that many rows each.
void configure(int upper, int lower) {
    TileConfig config;
    config.rows[C00] = config.rows[C01] = config.rows[A0] = static_cast<uint8_t>(upper);
    config.rows[C10] = config.rows[C11] = config.rows[A1] = static_cast<uint8_t>(lower);
    __asm__ volatile("ldtilecfg %0" : : "m"(config));
}

// Rows of x -> A tiles [halves of panels][steps]: 16 rows of 32 numbers each. Missing dims become zeros; in the place
// of missing rows stays what was there: their sums are never read.
void pack_rows(const uint16_t *x, int64_t stride, int64_t rows, int64_t k, char *to) {
    const int64_t steps = divide_up(k, STEP);
    const __mmask32 rest = (1u << k % STEP) - 1;
    for (int64_t row = 0; row < rows; row++, x += stride) {
        char *tile = to + row / ROWS * steps * TILE_BYTES + row % ROWS * 64;
        for (int64_t step = 0; step < steps; step++) {
            const __m512i numbers = _mm512_maskz_loadu_epi16(step < k / STEP ? ~0u : rest, x + step * STEP);
            _mm512_store_si512(tile + step * TILE_BYTES, numbers);
        }
    }
}

// Complete sums of a block on their way to y, a few rows at a time while the tile unit is busy with the next block.
struct Pending {
    const LinearWeight *w;
    const Sums *sums;  // of each panel
    int64_t block;
    Outputs y;
    int64_t rows, next;  // rows from `next` on are not written yet

    void write(int64_t count) {
        const int64_t end = smaller(next + count, rows);
        if (next >= end) return;
        if (y.wide) return write_rows<Gate::NONE, true>(end);
        switch (static_cast<Gate>(w->gate)) {
            case Gate::NONE: return write_rows<Gate::NONE>(end);
            case Gate::SILU: return write_rows<Gate::SILU>(end);
            case Gate::GELU_TANH: return write_rows<Gate::GELU_TANH>(end);
        }
    }

  private:
    template <Gate GATE, bool WIDE = false>
    void write_rows(int64_t end) {
        constexpr int64_t WIDTH = GATE == Gate::NONE ? BLOCK : HALF;
        constexpr int64_t AHEAD = 4;  // rows whose places in y are fetched in advance
        const int64_t outputs = smaller(WIDTH, w->n - block * WIDTH);
        const __mmask32 there = outputs == BLOCK ? ~0u : (1u << outputs) - 1;
        for (; next < end; next++) {
            const float *from = sums[next / PANEL].tile[next % PANEL / ROWS * 2] + next % ROWS * ROWS;
            Vec low = load(from), high = load(from + ROWS * ROWS);
            low = finished(*w, low, block * BLOCK), high = finished(*w, high, block * BLOCK + HALF);
            char *to = y.first + next * y.row_bytes + block * WIDTH * (WIDE ? 4 : 2);
            __builtin_prefetch(to + AHEAD * y.row_bytes, 1);
            if constexpr (WIDE) {
                _mm512_mask_storeu_ps(to, static_cast<__mmask16>(there), low);
                _mm512_mask_storeu_ps(to + HALF * 4, static_cast<__mmask16>(there >> HALF), high);
            } else if constexpr (GATE != Gate::NONE) {
                const Vec v = gated<Bf16Numbers, GATE>(Bf16Numbers::rounded(low), Bf16Numbers::rounded(high));
                _mm256_mask_storeu_epi16(to, static_cast<__mmask16>(there), Bf16Numbers::narrowed(v));
            } else {
                _mm512_mask_storeu_epi16(to, there, (__m512i)_mm512_cvtne2ps_pbh(high, low));
            }
        }
    }
};

// The length of equal parts of at most `most` steps.
inline int64_t part_of(int64_t steps, int64_t most) { return divide_up(steps, divide_up(steps, most)); }

// Hands out the units of a share's blocks, chunk by chunk: they lie in memory, and what will be read next is fetched
// meanwhile, to the first cache if NEAR, else to the second.
template <bool NEAR>
class UnitReader {
    static constexpr int64_t AHEAD = 8192;  // bytes that the weight is fetched in advance while one panel passes by

    const LinearWeight &w;
    const char *ahead = nullptr;
    const int lines;  // fetched a half step

  public:
    const int64_t chunk_steps;

    UnitReader(const LinearWeight &w, const Share &, int64_t panels, char *)
        : w(w), lines(static_cast<int>(divide_up(ROWS, panels))),
          chunk_steps(NEAR ? w.depth / UNITS : part_of(w.depth / UNITS, CHUNK)) {}

    const uint32_t *chunk(int64_t block, int64_t first, int64_t end) {
        const uint32_t *units = w.units + (block * w.depth + first * UNITS) * BLOCK;
        ahead = reinterpret_cast<const char *>(units) + (NEAR ? AHEAD : (end - first) * 2 * TILE_BYTES);
        return units;
    }
    void half_step() {
        for (int i = 0; i < lines; i++, ahead += 64) _mm_prefetch(ahead, NEAR ? _MM_HINT_T0 : _MM_HINT_T1);
    }
};

constexpr int64_t NEAR_CHUNK = 4, LONGEST_CHUNK = 6;  // steps, while one panel passes by and while many do
constexpr int64_t SCRATCH = 2 * LONGEST_CHUNK * 2 * TILE_BYTES;

// The same from codes: they become units in one of two chunks of scratch memory while the other one is multiplied by.
// (A tile that is loaded right after it was written waits until that has reached the cache.)
template <Codes CODES>
class CodeReader {
    const int64_t steps, units_at_once;  // of a block; that are made in a half step
    CodeStream<Bf16, CODES, 2> stream;
    int64_t later;              // steps of the share that no chunk so far has
    uint32_t *next, *to, *now;  // chunks: being made, and where in it; multiplied by
    int64_t left = 0;           // units of each column that the next chunk lacks

    // What comes after step `end` of a block.
    void begin(int64_t end) {
        const int64_t rest = steps - end % steps, length = smaller(later, smaller(chunk_steps, rest));
        later -= length;
        left = length * UNITS;
        to = next;
    }
    void widen(int64_t count) {
        for (count = smaller(count, left), left -= count; count > 0; count--, to += BLOCK) {
            Units units[2];
            stream.next(units);
            store_units(to, units[0]);
            store_units(to + HALF, units[1]);
        }
    }

  public:
    const int64_t chunk_steps;

    CodeReader(const LinearWeight &w, const Share &share, int64_t panels, char *scratch)
        : steps(w.depth / UNITS), units_at_once(divide_up(UNITS, 2 * panels)),
          stream(w, w.codes + share.first_block * code_bytes<Bf16>(w), 0),
          later((share.end_block - share.first_block) * steps), next(reinterpret_cast<uint32_t *>(scratch)), to(next),
          now(next + LONGEST_CHUNK * UNITS * BLOCK),
          chunk_steps(part_of(steps, panels == 1 ? NEAR_CHUNK : LONGEST_CHUNK)) {
        begin(0);
    }

    const uint32_t *chunk(int64_t, int64_t, int64_t end) {
        widen(left);
        uint32_t *made = next;
        next = now, now = made;
        begin(end);
        return now;
    }
    void half_step() { widen(units_at_once); }
};

// Where the A tiles of a panel lie: as rows of x, or packed.
struct PanelTiles {
    const char *first;      // of the upper half
    int64_t half;           // bytes from there to the lower half
    int64_t step, stride;   // bytes from step to step, and from row to row
};

// Takes in `steps` steps. b: units of the block. Meanwhile, each step, `weight` makes ready what comes next, half by
// half so that no tile is waited for, and `written` rows of `pending` are written.
template <bool BOTH, class Reader>
void multiply(const PanelTiles &tiles, int64_t first, const uint32_t *b, int64_t steps, Reader &weight,
              Pending &pending, int64_t written) {
    const char *a = tiles.first + first * tiles.step;
    for (int64_t step = 0; step < steps; step++, a += tiles.step, b += UNITS * BLOCK) {
        load_tile<A0>(a, tiles.stride);
        load_tile<B0>(b, BLOCK * 4);
        dot_bf16_tiles<C00, A0, B0>();
        if constexpr (BOTH) {
            load_tile<A1>(a + tiles.half, tiles.stride);
            dot_bf16_tiles<C10, A1, B0>();
        }
        weight.half_step();
        load_tile<B1>(b + ROWS, BLOCK * 4);
        dot_bf16_tiles<C01, A0, B1>();
        if constexpr (BOTH) dot_bf16_tiles<C11, A1, B1>();
        pending.write(written);
        weight.half_step();
    }
}

template <bool BOTH>
void zero_sums() {
    zero_tile<C00>();
    zero_tile<C01>();
    if constexpr (BOTH) zero_tile<C10>(), zero_tile<C11>();
}

template <bool BOTH>
void load_sums(const Sums &from) {
    load_tile<C00>(from.tile[0], 64);
    load_tile<C01>(from.tile[1], 64);
    if constexpr (BOTH) load_tile<C10>(from.tile[2], 64), load_tile<C11>(from.tile[3], 64);
}

template <bool BOTH>
void store_sums(Sums &to) {
    store_tile<C00>(to.tile[0], 64);
    store_tile<C01>(to.tile[1], 64);
    if constexpr (BOTH) store_tile<C10>(to.tile[2], 64), store_tile<C11>(to.tile[3], 64);
}

// One thread's rows and blocks.
class Multiplier {
    const LinearWeight &w;
    const int64_t steps;         // of a block
    const int64_t super_panels;  // packed together: as many as leave room in the second cache
    const char *plain;           // the rows at hand where they lie,
    int64_t row_bytes;           // and bytes from one to the next
    int64_t tile_rows;           // of the registers, both halves
    char *packed;                // A tiles of those that are not multiplied where they lie
    Sums *sums;                  // of two blocks and each panel
    char *scratch;               // of the reader
    Pending pending = {};

    // Steps [first, end) of one of many panels, or of a panel that stays in the tiles, and one block.
    template <bool BOTH, class Reader>
    void run(const PanelTiles &tiles, const uint32_t *b, int64_t first, int64_t end, bool stays, Reader &weight,
             Sums &own) {
        if (first == 0) zero_sums<BOTH>();
        else if (!stays) load_sums<BOTH>(own);
        multiply<BOTH>(tiles, first, b, end - first, weight, pending, divide_up(PANEL, steps));
        if (!stays || end == steps) store_sums<BOTH>(own);
    }

    // A panel is multiplied where it lies if it is whole tiles of as many rows as the registers have. (Rows a multiple
    // of 4096 bytes apart would fight for the same places of the cache.)
    bool in_place(int64_t there) const { return w.k % STEP == 0 && row_bytes % 4096 && there == tile_rows; }
    PanelTiles tiles_of(int64_t panel, int64_t there) const {
        if (in_place(there)) return {plain + panel * PANEL * row_bytes, ROWS * row_bytes, STEP * 2, row_bytes};
        return {packed + 2 * panel * steps * TILE_BYTES, steps * TILE_BYTES, TILE_BYTES, 64};
    }

    void place_rows(const uint16_t *x, int64_t x_stride, int64_t rows) {
        plain = reinterpret_cast<const char *>(x), row_bytes = x_stride * 2;
        for (int64_t p = 0; p < divide_up(rows, PANEL); p++, x += PANEL * x_stride) {
            const int64_t there = smaller(PANEL, rows - p * PANEL);
            if (!in_place(there)) pack_rows(x, x_stride, there, w.k, packed + 2 * p * steps * TILE_BYTES);
        }
    }

    // All panels pass by a chunk of the block, which stays in the first cache, before the next chunk comes.
    template <class Reader>
    void one_block(int64_t block, int64_t rows, Reader &weight, Sums *own) {
        const int64_t panels = divide_up(rows, PANEL);
        for (int64_t first = 0; first < steps; first += weight.chunk_steps) {
            const int64_t end = smaller(first + weight.chunk_steps, steps);
            const uint32_t *b = weight.chunk(block, first, end);
            for (int64_t p = 0; p < panels; p++) {
                const int64_t there = smaller(PANEL, rows - p * PANEL);
                const PanelTiles tiles = tiles_of(p, there);
                if (there > ROWS) run<true>(tiles, b, first, end, panels == 1, weight, own[p]);
                else run<false>(tiles, b, first, end, panels == 1, weight, own[p]);
            }
        }
    }

    // Packed rows by all blocks of the share.
    template <class Reader>
    void all_blocks(const Share &share, int64_t rows, const Outputs &y) {
        Reader weight(w, share, divide_up(rows, PANEL), scratch);
        for (int64_t block = share.first_block; block < share.end_block; block++) {
            Sums *own = sums + block % 2 * super_panels;
            one_block(block, rows, weight, own);
            pending.write(rows);
            pending = {&w, own, block, y, rows, 0};
        }
        pending.write(rows);
    }

  public:
    explicit Multiplier(const LinearWeight &w)
        : w(w), steps(divide_up(w.k, STEP)),
          super_panels(smaller(SUPER_PANELS, 1 + SUPER_BYTES / (steps * 2 * TILE_BYTES))) {}

    // False: no memory.
    bool multiply_share(const uint16_t *x, int64_t x_stride, const Outputs &y, Share share) {
        static thread_local ThreadMemory memory;
        const int64_t all = share.end_row - share.first_row;
        if (all <= 0 || share.first_block == share.end_block) return true;
        const int64_t halves = divide_up(smaller(all, super_panels * PANEL), ROWS);
        const int64_t sums_bytes = sizeof(Sums) * 2 * super_panels, scratch_bytes = w.codes ? SCRATCH : 0;
        char *room = memory.reserve(sums_bytes + scratch_bytes + halves * steps * TILE_BYTES);
        if (!room) return false;
        sums = reinterpret_cast<Sums *>(room);
        scratch = room + sums_bytes;
        packed = scratch + scratch_bytes;
        tile_rows = smaller(PANEL, all);
        configure(static_cast<int>(smaller(ROWS, all)), all > ROWS ? static_cast<int>(tile_rows - ROWS) : 1);
        for (int64_t row = share.first_row; row < share.end_row; row += super_panels * PANEL) {
            const int64_t rows = smaller(super_panels * PANEL, share.end_row - row);
            place_rows(x + row * x_stride, x_stride, rows);
            if (w.codes)
                with_codes(w, [&](auto codes) { all_blocks<CodeReader<codes()>>(share, rows, y.from(row)); });
            else if (rows <= PANEL) all_blocks<UnitReader<true>>(share, rows, y.from(row));
            else all_blocks<UnitReader<false>>(share, rows, y.from(row));
        }
        release_tiles();
        return true;
    }
};

}  // namespace

extern "C" int32_t octavo_linear_bf16_amx(const LinearCall *call) {
    const LinearWeight &w = *call->weight;
    const int threads = useful_threads(w, call->rows);
    bool failed = false;
    auto body = [&](int thread) {
        const Share share = share_of(thread, threads, call->rows, blocks_of(w), PANEL);
        Multiplier multiplier(w);
        const auto *x = static_cast<const uint16_t *>(call->x);
        if (!multiplier.multiply_share(x, call->x_stride, Outputs(*call, 2), share)) failed = true;
    };
    on_threads(threads, body);
    return failed;
}
