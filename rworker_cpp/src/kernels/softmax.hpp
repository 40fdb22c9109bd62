// Online softmax of the rows that read a chunk. A step that waits for a row's own result, such as its largest score,
// runs for all rows first, so that rows fill each other's waits.
#pragma once

#include "kernels/math.hpp"
#include "kernels/products.hpp"

namespace {

using rworker::kBlockRows;

template <class L>
inline void cap_scores(float* scores, Range tokens, float soft_cap) {
    const auto cap = L::set1(soft_cap);
    for (int t = tokens.begin; t < tokens.end; t += L::width)
        L::store(scores + t, L::mul(cap, tanh<L>(L::div(L::load(scores + t), cap))));
}

/// ALiBi: adds slope * (position of the key - position of the query). This difference is `first` for the chunk's first
/// key and a whole number, exact in a float. So scores of nearby keys, which weigh most, lose least by rounding.
template <class L>
inline void add_slope(float* scores, Range tokens, float slope, float first) {
    for (int t = tokens.begin; t < tokens.end; t += L::width) {
        const auto distance = L::add(L::iota(), L::set1(first + float(t)));
        L::store(scores + t, L::fma(L::set1(slope), distance, L::load(scores + t)));
    }
}

/// Sets -inf as the score of `tokens` outside `seen`.
template <class L>
inline void hide_unseen(float* scores, Range tokens, Range seen) {
    const auto begin = L::set1(float(seen.begin)), end = L::set1(float(seen.end)), minus_inf = L::set1(-kInfinity);
    for (int t = tokens.begin; t < tokens.end; t += L::width) {
        const auto token = L::add(L::iota(), L::set1(float(t)));
        const auto before_end = L::if_less(token, end, L::load(scores + t), minus_inf);
        L::store(scores + t, L::if_less(token, begin, minus_inf, before_end));
    }
}

/// Calls f(worked_on). A whole chunk is passed as a constant, so that its loops are unrolled.
template <int ChunkTokens, class F>
[[gnu::always_inline]] inline void with_constant_range(Range worked_on, F f) {
    if (worked_on.begin == 0 && worked_on.end == ChunkTokens) return f(Range{0, ChunkTokens});
    f(worked_on);
}

/// The softmax state of the rows of a block, and its changes by the current chunk. Each value belongs to a row.
template <class L>
struct RowSums {
    alignas(64) float max[kBlockRows], sum[kBlockRows], top[kBlockRows], base[kBlockRows], keep[kBlockRows],
        added[kBlockRows];

    void clear(int rows) {
        for (int r = 0; r < padded(rows); r += L::width) {
            L::store(max + r, L::set1(-kInfinity)), L::store(top + r, L::set1(-kInfinity));
            L::store(sum + r, L::set1(0.0f)), L::store(added + r, L::set1(0.0f));
        }
    }

    /// Finds the largest score of a row, over the chunk's part in `top`. Scores that are not `seen` become -inf.
    [[gnu::always_inline]] void find_top(int row, float* scores, Range worked_on, Range seen) {
        if (seen.begin > worked_on.begin || seen.end < worked_on.end) hide_unseen<L>(scores, worked_on, seen);
        auto largest = L::set1(-kInfinity);
        RWORKER_UNROLL
        for (int t = worked_on.begin; t < worked_on.end; t += L::width) largest = L::max(largest, L::load(scores + t));
        top[row] = L::reduce_max(largest);
    }

    /// Computes new maxima, the numbers to subtract from scores (-inf - -inf would be NaN), and the factors of older
    /// outputs.
    void renew_maxima(int rows) {
        for (int r = 0; r < padded(rows); r += L::width) {
            const auto old = L::load(max + r), largest = L::max(old, L::load(top + r));
            const auto from = L::if_less(largest, L::set1(-__FLT_MAX__), L::set1(0.0f), largest);
            L::store(max + r, largest), L::store(base + r, from);
            L::store(keep + r, exp_nonpositive_one<L>(L::sub(old, from)));
        }
    }

    /// Turns scores of a row into weights exp(score - max), 0 for unseen tokens. It sets only `worked_on`, the whole
    /// vectors that some row sees. No other weight is used, and zeros add nothing.
    template <class S>
    [[gnu::always_inline]] void weigh_row(int row, float* scores, Range worked_on) {
        constexpr int side_by_side = 4;
        auto total = L::set1(0.0f);
        int t = worked_on.begin;
        RWORKER_UNROLL
        for (; t + side_by_side * L::width <= worked_on.end; t += side_by_side * L::width)
            total = weigh<side_by_side>(row, scores + t, total);
        for (; t < worked_on.end; t += L::width) total = weigh<1>(row, scores + t, total);
        added[row] = L::reduce_add(total);
        if constexpr (S::packs_factors) S::pack_factors(scores, kChunkTokens);
    }

    void renew_sums(int rows) {
        for (int r = 0; r < padded(rows); r += L::width)
            L::store(sum + r, L::add(L::mul(L::load(sum + r), L::load(keep + r)), L::load(added + r)));
    }

  private:
    /// Returns `total` + the weights.
    template <int Vectors>
    [[gnu::always_inline]] typename L::vec weigh(int row, float* scores, typename L::vec total) {
        typename L::vec weights[Vectors];
        RWORKER_UNROLL
        for (int v = 0; v < Vectors; ++v) weights[v] = L::sub(L::load(scores + v * L::width), L::set1(base[row]));
        exp_nonpositive<L>(weights);
        RWORKER_UNROLL
        for (int v = 0; v < Vectors; ++v) {
            L::store(scores + v * L::width, weights[v]);
            total = L::add(total, weights[v]);
        }
        return total;
    }

    static int padded(int rows) { return (rows + L::width - 1) / L::width * L::width; }
};

}  // namespace
