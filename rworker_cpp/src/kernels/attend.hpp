// Attention of stacked query rows over one split, in one pass: scores of 64 tokens, online softmax, weighted values.
//
// A row's result has the same bits however many rows run beside it: each of its sums takes the same operands in the
// same order whatever the register blocking, and a chunk in which it sees nothing leaves it as it was.
#pragma once

#include "kernels/math.hpp"
#include "kernels/merge.hpp"
#include "kernels/products.hpp"
#include "kernels/scores_int.hpp"
#include "kernels/transpose.hpp"
#include "kernels/values_int.hpp"

namespace {

using rworker::AttendArgs;
using rworker::kBlockRows;
using rworker::ReadAhead;
using rworker::TokenRow;

template <class L>
inline void cap_scores(float* scores, Range tokens, float soft_cap) {
    const auto cap = L::set1(soft_cap);
    for (int t = tokens.begin; t < tokens.end; t += L::width)
        L::store(scores + t, L::mul(cap, tanh<L>(L::div(L::load(scores + t), cap))));
}

/// ALiBi: adds slope * (position of the key - position of the query), which lies `first` for the chunk's first key and
/// is a whole number, exact in a float. So the scores that weigh most, of keys nearby, lose least by rounding.
template <class L>
inline void add_slope(float* scores, Range tokens, float slope, float first) {
    for (int t = tokens.begin; t < tokens.end; t += L::width) {
        const auto distance = L::add(L::iota(), L::set1(first + float(t)));
        L::store(scores + t, L::fma(L::set1(slope), distance, L::load(scores + t)));
    }
}

/// -inf for the scores of `tokens` outside `seen`.
template <class L>
inline void hide_unseen(float* scores, Range tokens, Range seen) {
    const auto begin = L::set1(float(seen.begin)), end = L::set1(float(seen.end)), minus_inf = L::set1(-kInfinity);
    for (int t = tokens.begin; t < tokens.end; t += L::width) {
        const auto token = L::add(L::iota(), L::set1(float(t)));
        const auto before_end = L::if_less(token, end, L::load(scores + t), minus_inf);
        L::store(scores + t, L::if_less(token, begin, minus_inf, before_end));
    }
}

/// Scores of one row to weights exp(score - max), 0 for what it does not see; returns the factor for its old output.
/// Only `worked_on`, whole vectors that all rows together touch, is set: no other weight is used, and zeros add
/// nothing.
template <class L>
float soften(float* scores, Range worked_on, Range seen, float& max, float& sum) {
    using vec = typename L::vec;
    if (seen.begin > worked_on.begin || seen.end < worked_on.end) hide_unseen<L>(scores, worked_on, seen);
    vec top = L::set1(-kInfinity);
    for (int t = worked_on.begin; t < worked_on.end; t += L::width) top = L::max(top, L::load(scores + t));
    const float chunk_max = L::reduce_max(top), new_max = max > chunk_max ? max : chunk_max;
    const float base = new_max == -kInfinity ? 0.0f : new_max;  // -inf - -inf would be NaN
    const float keep = exp_nonpositive_one<L>(max - base);
    vec total = L::set1(0.0f);
    for (int t = worked_on.begin; t < worked_on.end; t += L::width) {
        const vec weight = exp_nonpositive<L>(L::sub(L::load(scores + t), L::set1(base)));
        L::store(scores + t, weight);
        total = L::add(total, weight);
    }
    max = new_max;
    sum = sum * keep + L::reduce_add(total);
    return keep;
}

/// Factors of dot products. Queries are packed before they are scaled: those of a bfloat16 model lose nothing.
template <class L>
inline void pack_all_pairs(float* floats, int count) {
    for (int i = 0; i < count; i += L::width) L::pack_pairs(floats + i);
}

template <class L>
inline void scale_scores(float* scores, float scale) {
    for (int t = 0; t < kChunkTokens; t += L::width) L::store(scores + t, L::mul(L::load(scores + t), L::set1(scale)));
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

/// Up to kBlockRows query rows, widened and scaled, over all chunks of the split.
template <class L, DType D>
struct RowBlock {
    using S = Stored<L, D>;
    const AttendArgs& args;
    const int64_t first_row;
    const int rows;
    const bool last;           // of the blocks
    uint8_t* const open_keys;  // those of a last tile that is not full, in lanes
    const int query_stride = round_up16(args.key_dim), padded_dim = round_up16(args.value_dim);
    const int key_lines = (args.key_dim + S::pack - 1) / S::pack;
    float* const queries = args.scratch;
    float* const scores = queries + kBlockRows * query_stride;
    float* const keep = scores + kBlockRows * kChunkTokens;
    float* outputs[kBlockRows];
    int64_t ends[kBlockRows];  // one past the last token a row sees
    int64_t begin = args.end, end = 0;

    RowBlock(const AttendArgs& call, uint8_t* open_keys_in_lanes, int64_t row, int64_t rows_left)
        : args(call),
          first_row(row),
          rows(int(rows_left < kBlockRows ? rows_left : kBlockRows)),
          last(rows_left <= kBlockRows),
          open_keys(open_keys_in_lanes) {}

    int64_t begin_of(int row) const { return args.window && ends[row] > args.window ? ends[row] - args.window : 0; }

    void prepare() {
        const int64_t row_floats = rworker::partial_floats(args.value_dim);
        int64_t index = first_row / args.group, head = first_row % args.group;
        for (int r = 0; r < rows; ++r, head = head + 1 < args.group ? head + 1 : (++index, 0)) {
            const TokenRow& token = args.tokens[index];
            const int64_t query = token.payload_row * args.token_stride + head * args.key_dim;
            widen_row<L>(args.dtype, element(args.dtype, args.queries, query), args.key_dim,
                         S::pair_dot ? 1.0f : args.scale, queries + r * query_stride);
            if constexpr (S::pair_dot) pack_all_pairs<L>(queries + r * query_stride, query_stride);
            if constexpr (is_quantized(D)) quantize_query<L, D>(queries + r * query_stride, query_stride);
            ends[r] = token.position + 1;
            begin = begin_of(r) < begin ? begin_of(r) : begin;
            end = ends[r] > end ? ends[r] : end;
            const Partial partial(args.partials + (token.partials + args.split) * args.partial_stride +
                                  head * row_floats);
            outputs[r] = partial.output;
            *partial.max = -kInfinity;
            *partial.sum = 0.0f;
            for (int d = 0; d < padded_dim; d += L::width) L::store(partial.output + d, L::set1(0.0f));
        }
        const int64_t split_begin = args.split * rworker::kSplitTokens;
        begin = begin > split_begin ? begin : split_begin;
        end = end < args.end ? end : args.end;
    }

    void run() {
        prepare();
        for (int64_t chunk = begin / kChunkTokens * kChunkTokens; chunk < end; chunk += kChunkTokens)
            attend_chunk(chunk, clip(begin, end, chunk));
    }

    /// As many tiles as this chunk has, a chunk further on: of this call, and past its end of the one that comes after
    /// it. So a tile's work always asks for a tile, however few tokens are left for the last chunk. A call of one chunk
    /// asks for all of the next one's first.
    Coming coming_after(int64_t chunk) const {
        const int64_t first = chunk / kTileTokens, own_end = tiles_of(end);
        const bool alone = chunk <= begin && first + kChunkTiles >= own_end;
        const int64_t from = alone ? own_end : first + kChunkTiles;
        const int64_t to = from + (alone || own_end - first > kChunkTiles ? kChunkTiles : own_end - first);
        Coming coming;
        coming.tiles[0] = tile_of(args.view, first).keys;
        for (int64_t tile = from; tile < to && tile < own_end; ++tile) coming.add(tile_of(args.view, tile));
        if (to > own_end && last && args.next) add_next(coming, from - own_end, to - own_end);
        coming.key_lines = int((args.view.key_tile_bytes + kCacheLineBytes - 1) / kCacheLineBytes);
        coming.value_lines = int((args.view.value_tile_bytes + kCacheLineBytes - 1) / kCacheLineBytes);
        coming.read_ahead = args.read_ahead;
        const bool all = coming.num_tiles == kChunkTiles;  // pages side by side take a tile of each
        if (!all && coming.read_ahead == ReadAhead::pages) coming.read_ahead = ReadAhead::run;
        return coming;
    }

    /// Tiles `from` to `to` of the call that comes after this one.
    void add_next(Coming& coming, int64_t from, int64_t to) const {
        const int64_t first = args.next->begin / kTileTokens, tiles = tiles_of(args.next->end) - first;
        for (int64_t tile = from > 0 ? from : 0; tile < to && tile < tiles; ++tile)
            coming.add(tile_of(args.next->view, first + tile));
    }

    static int64_t tiles_of(int64_t tokens) { return (tokens + kTileTokens - 1) / kTileTokens; }

    void attend_chunk(int64_t chunk, Range seen) {
        Tile tiles[kChunkTiles];
        const Range worked_on = is_quantized(D) ? whole_tiles(seen) : round_out(seen, L::width);
        find_tiles(chunk, seen, tiles);
        const Coming coming = coming_after(chunk);
        Ahead ahead(coming), idle = Ahead::idle(coming);
        for_row_groups<L>(rows, [&]<int R>(int r) {
            score_rows<L, D, R>(tiles, seen, r == 0 ? ahead : idle, queries + r * query_stride, query_stride, key_lines,
                                scores + r * kChunkTokens);
        });
        for (int r = 0; r < rows; ++r) {
            if constexpr (S::pair_dot) scale_scores<L>(scores + r * kChunkTokens, args.scale);
            if (args.soft_cap != 0.0f || args.alibi_slopes) bend_scores(r, chunk, worked_on);
            const auto partial = Partial<float>::of_output(outputs[r]);
            keep[r] = soften<L>(scores + r * kChunkTokens, worked_on, clip(begin_of(r), ends[r], chunk), *partial.max,
                                *partial.sum);
            if constexpr (S::pair_dot) pack_all_pairs<L>(scores + r * kChunkTokens, kChunkTokens);
        }
        for_row_groups<L>(rows, [&]<int R>(int r) {
            add_value_rows<L, D, R>(tiles, seen, r == 0 ? ahead : idle, scores + r * kChunkTokens, keep + r,
                                    outputs + r, padded_dim);
        });
    }

    /// A soft cap, then ALiBi; apart from the loop, so that layers without them pay nothing.
    [[gnu::noinline]] void bend_scores(int row, int64_t chunk, Range worked_on) const {
        float* const row_scores = scores + row * kChunkTokens;
        if (args.soft_cap != 0.0f) cap_scores<L>(row_scores, worked_on, args.soft_cap);
        if (args.alibi_slopes)
            add_slope<L>(row_scores, worked_on, args.alibi_slopes[(first_row + row) % args.group],
                         float(chunk + 1 - ends[row]));
    }

    void find_tiles(int64_t chunk, Range seen, Tile* tiles) const {
        for (int i = seen.begin / kTileTokens; i * kTileTokens < seen.end; ++i) {
            tiles[i] = tile_of(args.view, chunk / kTileTokens + i);
            if (chunk + (i + 1) * kTileTokens > args.end) tiles[i].keys = open_keys;
        }
    }
};

/// The keys of the last tile, which is not full, from rows to lanes: in the scratch, behind what a RowBlock uses.
template <class L, DType D>
uint8_t* turn_open_keys(const AttendArgs& args) {
    using S = Stored<L, D>;
    using Word = StoredWord<S::lane_bytes>;
    const uint8_t* const open = tile_of(args.view, args.end / kTileTokens).keys;
    uint8_t* const tile = reinterpret_cast<uint8_t*>(args.scratch + rworker::open_tile_offset(args.key_dim));
    int header = 0;
    if constexpr (is_quantized(D)) header = header_bytes<D>(args.key_dim);
    __builtin_memcpy(tile, open, size_t(header));
    rows_to_lanes(reinterpret_cast<const Word*>(open + header), int(args.end % kTileTokens),
                  (args.key_dim + S::pack - 1) / S::pack, reinterpret_cast<Word*>(tile + header));
    __asm__ volatile("" ::: "memory");  // what is stored as words will be loaded as floats
    return tile;
}

template <class L, DType D>
void attend(const AttendArgs& args) {
    uint8_t* const open_keys = args.end % kTileTokens != 0 ? turn_open_keys<L, D>(args) : nullptr;
    const int64_t rows = args.num_tokens * args.group;
    for (int64_t row = 0; row < rows; row += kBlockRows) RowBlock<L, D>(args, open_keys, row, rows - row).run();
}

}  // namespace
