// Attention of stacked query rows over one split, in one pass: scores of 64 tokens, online softmax, weighted values.
//
// A row's result has the same bits however many rows run beside it: each of its sums takes the same operands in the
// same order whatever the register blocking, and a chunk in which it sees nothing leaves it as it was.
#pragma once

#include "kernels/math.hpp"
#include "kernels/merge.hpp"
#include "kernels/products.hpp"

namespace {

using rworker::AttendArgs;
using rworker::kBlockRows;

/// Scores of one row to weights exp(score - max), 0 for what it does not see; returns the factor for its old output.
template <class L>
float soften(float* scores, Range seen, float soft_cap, float& max, float& sum) {
    using vec = typename L::vec;
    const vec begin = L::set1(float(seen.begin)), end = L::set1(float(seen.end)), minus_inf = L::set1(-kInfinity);
    vec top = minus_inf;
    for (int t = 0; t < kChunkTokens; t += L::width) {
        vec score = L::load(scores + t);
        if (soft_cap != 0.0f) score = L::mul(L::set1(soft_cap), tanh<L>(L::div(score, L::set1(soft_cap))));
        if (seen.begin > t || seen.end < t + L::width) {
            const vec token = L::add(L::iota(), L::set1(float(t)));
            score = L::if_less(token, begin, minus_inf, L::if_less(token, end, score, minus_inf));
        }
        L::store(scores + t, score);
        top = L::max(top, score);
    }
    const float chunk_max = L::reduce_max(top), new_max = max > chunk_max ? max : chunk_max;
    const float base = new_max == -kInfinity ? 0.0f : new_max;  // -inf - -inf would be NaN
    const float keep = exp_nonpositive_one<L>(max - base);
    vec total = L::set1(0.0f);
    for (int t = 0; t < kChunkTokens; t += L::width) {
        const vec weight = exp_nonpositive<L>(L::sub(L::load(scores + t), L::set1(base)));
        L::store(scores + t, weight);
        total = L::add(total, weight);
    }
    max = new_max;
    sum = sum * keep + L::reduce_add(total);
    return keep;
}

/// Calls f with 1..L::max_rows as a compile-time constant, until `rows` are done.
template <class L, int Rows = L::max_rows, class F>
inline void for_row_groups(int rows, F f) {
    int row = 0;
    for (; row + Rows <= rows; row += Rows) f.template operator()<Rows>(row);
    if constexpr (Rows > 1)
        if (row < rows)
            for_row_groups<L, Rows - 1>(rows - row, [&]<int R>(int r) { f.template operator()<R>(row + r); });
}

/// Up to kBlockRows rows of a span, their queries widened and scaled, over all chunks of the split.
template <class L, DType D>
struct RowBlock {
    const AttendArgs& args;
    const int64_t first_row;
    const int rows;
    const int query_stride = round_up16(args.key_dim), padded_dim = round_up16(args.value_dim);
    const Partial<float> partial{args.partial, args.rows.rows, args.value_dim};
    float* const queries = args.scratch;
    float* const scores = queries + kBlockRows * query_stride;
    float* const keep = scores + kBlockRows * kChunkTokens;

    int64_t end_of(int row) const { return args.first_position + (first_row + row) / args.rows.group + 1; }
    int64_t begin_of(int row) const { return args.window && end_of(row) > args.window ? end_of(row) - args.window : 0; }

    void prepare() {
        for (int r = 0; r < rows; ++r) {
            const void* query = element(args.dtype, args.queries, row_offset(args.rows, first_row + r));
            widen_row<L>(args.dtype, query, args.key_dim, args.scale, queries + r * query_stride);
            partial.max[first_row + r] = -kInfinity;
            partial.sum[first_row + r] = 0.0f;
            float* output = partial.output_row(first_row + r);
            for (int d = 0; d < padded_dim; d += L::width) L::store(output + d, L::set1(0.0f));
        }
    }

    void run() {
        prepare();
        const int64_t begin = begin_of(0) > args.begin ? begin_of(0) : args.begin;
        const int64_t end = end_of(rows - 1) < args.end ? end_of(rows - 1) : args.end;
        for (int64_t chunk = begin / kChunkTokens * kChunkTokens; chunk < end; chunk += kChunkTokens)
            attend_chunk(chunk, clip(begin, end, chunk));
    }

    void attend_chunk(int64_t chunk, Range seen) {
        Tile tiles[kChunkTiles];
        const int64_t last_tile = (args.end - 1) / kTileTokens;
        for (int i = seen.begin / kTileTokens; i * kTileTokens < seen.end; ++i) {
            const int64_t tile = chunk / kTileTokens + i, next = tile + kChunkTiles;
            tiles[i] = tile_of(args.view, tile);
            tiles[i].next_keys = next <= last_tile ? tile_of(args.view, next).keys : tiles[i].keys;
        }
        const int lines = (args.key_dim + Stored<L, D>::pack - 1) / Stored<L, D>::pack;
        for_row_groups<L>(rows, [&]<int R>(int r) {
            score_rows<L, D, R>(tiles, seen, queries + r * query_stride, query_stride, lines,
                                scores + r * kChunkTokens);
        });
        for (int r = 0; r < rows; ++r)
            keep[r] = soften<L>(scores + r * kChunkTokens, clip(begin_of(r), end_of(r), chunk), args.soft_cap,
                                partial.max[first_row + r], partial.sum[first_row + r]);
        for_row_groups<L>(rows, [&]<int R>(int r) {
            add_value_rows<L, D, R>(tiles, seen, scores + r * kChunkTokens, keep + r, partial.output_row(first_row + r),
                                    padded_dim);
        });
    }
};

template <class L, DType D>
void attend(const AttendArgs& args) {
    for (int64_t row = 0; row < args.rows.rows; row += kBlockRows) {
        const int64_t left = args.rows.rows - row;
        RowBlock<L, D>{args, row, int(left < kBlockRows ? left : kBlockRows)}.run();
    }
}

}  // namespace
