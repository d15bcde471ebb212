// Draws from what top-k, top-p and min-p leave of a row, without sorting it. Contract: kernels/ops.py.
//
// Tokens that may stay are found by a floor, dropped into bins by their logit, and counted and weighed by bin. Where the
// order of tokens is cut, and where the drawn one lies, is found bin by bin; only the bins in which that happens are
// sorted. Sums go over tokens in a fixed order, so a row's token depends on the row only.

#include "parallel.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdlib.h>
#include <string.h>

namespace {

constexpr int64_t BLOCK = 64;  // numbers whose maximum is known; a row is whole blocks
constexpr int BINS = 8192;
constexpr float BINS_A_UNIT = 128;
constexpr double SLACK = 0.01;  // how far a floor lies below the exact one, so that rounding loses no token
constexpr float LOWEST = std::numeric_limits<float>::lowest();  // -inf is below every floor

struct Limits {
    int64_t top_k;  // 0: off
    double top_p;   // 1: off
    double min_p;   // 0: off
};

// How much of the order stays: all of the bins before `bin`, and the first `inside` tokens of that.
struct Cut {
    int bin;
    int64_t inside;

    bool operator<(const Cut &other) const { return bin != other.bin ? bin < other.bin : inside < other.inside; }
};

int bin_of(float x) { return static_cast<int>(std::min(-x * BINS_A_UNIT, static_cast<float>(BINS - 1))); }

// Scratch of one thread. (Of the standard library's own containers the linker would keep code that others see.)
template <class T>
struct Array {
    explicit Array(int64_t size) : data(static_cast<T *>(malloc(size * sizeof(T)))) {}
    Array(const Array &) = delete;
    ~Array() { free(data); }
    T &operator[](int64_t i) { return data[i]; }

    T *const data;
};

// The work on one row after another, and its scratch.
class Truncation {
public:
    explicit Truncation(int64_t width)
        : width(width), blocks(width / BLOCK), maxima(blocks), largest(blocks), tokens(width), bins(width),
          counts(BINS), mass(BINS), of_bin(width) {}

    bool ready() const {
        return maxima.data && largest.data && tokens.data && bins.data && counts.data && mass.data && of_bin.data;
    }

    int64_t drawn(const float *row, const float *row_weights, const Limits &limits, double uniform) {
        x = row;
        weights = row_weights;
        find_maxima();
        fill_bins(floor_of(limits));
        Cut cut{last, counts[last]};
        if (limits.top_k) cut = by_count(limits.top_k);
        const double mass = limits.top_k ? weight_of(cut) : total;
        if (limits.top_p < 1) cut = std::min(cut, by_weight(limits.top_p * mass));
        if (limits.min_p > 0) cut = std::min(cut, by_logit(std::log(limits.min_p)));
        return token_at(cut, uniform * weight_of(cut));
    }

private:
    void find_maxima() {
        for (int64_t block = 0; block < blocks; block++) {
            float lanes[16];
            memcpy(lanes, x + block * BLOCK, sizeof lanes);
            for (int64_t i = 16; i < BLOCK; i += 16)
                for (int j = 0; j < 16; j++) lanes[j] = std::max(lanes[j], x[block * BLOCK + i + j]);
            maxima[block] = lanes[0];
            for (const float lane : lanes) maxima[block] = std::max(maxima[block], lane);
        }
    }

    // All that stays is at least so likely. Sets `total` where it counts.
    float floor_of(const Limits &limits) {
        if (limits.top_k) {  // at least k numbers reach the k-th largest maximum
            if (limits.top_k > blocks) return LOWEST;
            memcpy(largest.data, maxima.data, blocks * sizeof(float));
            std::nth_element(largest.data, largest.data + (limits.top_k - 1), largest.data + blocks,
                             [](float a, float b) { return a > b; });
            return std::max(largest[limits.top_k - 1], LOWEST);
        }
        double floor = LOWEST;
        if (limits.top_p < 1) {  // tokens below it weigh less than 1 - p together
            double lanes[8] = {};
            for (int64_t i = 0; i < width; i += 8)
                for (int j = 0; j < 8; j++) lanes[j] += weights[i + j];
            total = 0;
            for (const double lane : lanes) total += lane;
            floor = std::max(floor, std::log((1 - limits.top_p) * total / width) - SLACK);
        }
        if (limits.min_p > 0) floor = std::max(floor, std::log(limits.min_p) - SLACK);
        return static_cast<float>(floor);
    }

    void fill_bins(float floor) {
        size = 0;
        for (int64_t block = 0; block < blocks; block++) {
            if (maxima[block] < floor) continue;
            for (int64_t i = block * BLOCK; i < (block + 1) * BLOCK; i++) {
                tokens[size] = static_cast<int32_t>(i);
                size += x[i] >= floor;
            }
        }
        memset(counts.data, 0, BINS * sizeof(int64_t));
        memset(mass.data, 0, BINS * sizeof(double));
        last = 0;
        for (int64_t i = 0; i < size; i++) {
            const int bin = bin_of(x[tokens[i]]);
            bins[i] = static_cast<uint16_t>(bin);
            counts[bin]++;
            mass[bin] += weights[tokens[i]];
            last = std::max(last, bin);
        }
        sorted = -1;
    }

    // The tokens of a bin, most likely first, of equals the lower one.
    const int32_t *members(int bin) {
        if (sorted == bin) return of_bin.data;
        int32_t *end = of_bin.data;
        for (int64_t i = 0; i < size; i++)
            if (bins[i] == bin) *end++ = tokens[i];
        const auto before = [this](int32_t a, int32_t b) { return x[a] != x[b] ? x[a] > x[b] : a < b; };
        if (!std::is_sorted(of_bin.data, end, before)) std::sort(of_bin.data, end, before);
        sorted = bin;
        return of_bin.data;
    }

    Cut by_count(int64_t count) {
        for (int bin = 0; bin <= last; bin++) {
            if (counts[bin] >= count) return {bin, count};
            count -= counts[bin];
        }
        return {last, counts[last]};
    }

    // The fewest that together reach `wanted`.
    Cut by_weight(double wanted) {
        double sum = 0;
        for (int bin = 0; bin <= last; sum += mass[bin++]) {
            if (sum + mass[bin] < wanted) continue;
            const int32_t *inside = members(bin);
            int64_t i = 0;
            while (i < counts[bin] && sum < wanted) sum += weights[inside[i++]];
            return {bin, std::max<int64_t>(i, 1)};
        }
        return {last, counts[last]};
    }

    Cut by_logit(double floor) {
        const int bin = bin_of(static_cast<float>(floor));
        if (bin > last) return {last, counts[last]};
        const int32_t *inside = members(bin);
        int64_t i = 0;
        while (i < counts[bin] && x[inside[i]] >= floor) i++;
        return {bin, i};
    }

    double weight_of(const Cut &cut) {
        double sum = 0;
        for (int bin = 0; bin < cut.bin; bin++) sum += mass[bin];
        const int32_t *inside = members(cut.bin);
        for (int64_t i = 0; i < cut.inside; i++) sum += weights[inside[i]];
        return sum;
    }

    // The first token with which the sum of weights exceeds `target`, which is below that of all before the cut.
    int64_t token_at(const Cut &cut, double target) {
        double sum = 0;
        int bin = 0;
        for (; bin < cut.bin && sum + mass[bin] <= target; bin++) sum += mass[bin];
        const int32_t *inside = members(bin);
        const int64_t count = bin < cut.bin ? counts[bin] : cut.inside;
        int64_t i = 0;
        while (i + 1 < count && (sum += weights[inside[i]]) <= target) i++;
        return inside[i];
    }

    const int64_t width, blocks;
    const float *x = nullptr, *weights = nullptr;
    double total = 0;
    Array<float> maxima, largest;
    int64_t size = 0;
    Array<int32_t> tokens;  // that reach the floor: `size` of them, ascending
    Array<uint16_t> bins;   // of each
    Array<int64_t> counts;
    Array<double> mass;
    int last = 0;  // the last bin that is not empty
    int sorted = -1;
    Array<int32_t> of_bin;  // of bin `sorted`
};

}  // namespace

// x, weights: [.., width], rows `stride` numbers apart; the others: [count].
// Not 0: no memory.
extern "C" int32_t octavo_draw_truncated(const float *x, const float *weights, int64_t x_stride, int64_t weights_stride,
                                         int64_t width, const int64_t *rows, int64_t count, const int64_t *top_k,
                                         const double *top_p, const double *min_p, const double *uniform,
                                         int64_t *drawn) {
    const int64_t threads = std::min(count, octavo_threads());
    bool failed = false;
    auto body = [&](int thread) {
        Truncation truncation(width);
        if (!truncation.ready()) {
            failed = true;
            return;
        }
        for (int64_t i = thread; i < count; i += threads)
            drawn[i] = truncation.drawn(x + rows[i] * x_stride, weights + rows[i] * weights_stride,
                                        {top_k[i], top_p[i], min_p[i]}, uniform[i]);
    };
    on_threads(static_cast<int>(threads), body);
    return failed;
}
