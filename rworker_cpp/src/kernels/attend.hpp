// Attention of stacked query rows over one split in one pass: scores of a chunk, online softmax, weighted values.
//
// A row's result has the same bits however many rows run beside it. Each of its sums takes the same operands in the
// same order, whatever the register blocking. A chunk in which the row sees nothing does not change it.
#pragma once

#include "kernels/merge.hpp"
#include "kernels/rotate.hpp"
#include "kernels/scores_int.hpp"
#include "kernels/softmax.hpp"
#include "kernels/transpose.hpp"
#include "kernels/values_int.hpp"

namespace {

using rworker::AttendArgs;
using rworker::ReadAhead;
using rworker::TokenRow;

/// Calls f with `count`, 1 to Most, as a compile-time constant.
template <int Most, class F>
inline void with_count(int count, F f) {
    if constexpr (Most > 1)
        if (count < Most) return with_count<Most - 1>(count, f);
    f.template operator()<Most>();
}

template <class L, DType D>
constexpr int kMostRows = is_quantized(D) ? L::code_rows : L::float_rows;

/// The number of dims whose products take as long as a row's softmax, about.
template <class S>
constexpr int kSoftmaxDims = S::pair_dot ? 32 : 16;

/// The smallest number of groups of rows that fit the registers.
template <class L, DType D>
inline int row_groups(int rows) {
    return (rows + kMostRows<L, D> - 1) / kMostRows<L, D>;
}

/// Calls f with the size of a group, as a compile-time constant, and its first row, until `rows` are done. Groups are
/// of nearly equal size, since a single last row would load all lines for little work.
template <class L, DType D, class F>
inline void for_row_groups(int rows, F f) {
    for (int row = 0, left = row_groups<L, D>(rows); left > 0; --left) {
        const int count = (rows - row + left - 1) / left;
        with_count<kMostRows<L, D>>(count, [&]<int R>() { f.template operator()<R>(row); });
        row += count;
    }
}

/// Up to kBlockRows query rows, widened and scaled, over all chunks of the split.
template <class L, DType D>
struct RowBlock {
    using S = Stored<L, D>;
    static constexpr int chunk_size = chunk_tokens<L, D>, chunk_tiles = chunk_size / kTileTokens;
    const AttendArgs& args;
    const int64_t first_row;
    const int rows;
    const bool last;           // of the blocks
    uint8_t* const open_keys;  // keys of a last tile that is not full, in lanes
    const int query_stride = round_up16(args.key_dim), padded_dim = round_up16(args.value_dim);
    const int key_lines = (args.key_dim + S::pack - 1) / S::pack;
    float* const queries = args.scratch;
    float* const scores = queries + kBlockRows * query_stride;
    RowSums<L> sums;
    float* outputs[kBlockRows];
    int64_t begins[kBlockRows], ends[kBlockRows];  // the tokens a row sees
    int64_t begin = args.end, end = 0;

    RowBlock(const AttendArgs& call, uint8_t* open_keys_in_lanes, int64_t row, int64_t rows_left)
        : args(call),
          first_row(row),
          rows(int(rows_left < kBlockRows ? rows_left : kBlockRows)),
          last(rows_left <= kBlockRows),
          open_keys(open_keys_in_lanes) {}

    void prepare() {
        const int64_t row_floats = rworker::partial_floats(args.value_dim);
        int64_t index = first_row / args.group, head = first_row % args.group;
        for (int r = 0; r < rows; ++r, head = head + 1 < args.group ? head + 1 : (++index, 0)) {
            const TokenRow& token = args.tokens[index];
            const int64_t query = token.payload_row * args.token_stride + head * args.key_dim;
            widen_row<L>(args.dtype, element(args.dtype, args.queries, query), args.key_dim,
                         S::packs_factors ? 1.0f : args.scale, queries + r * query_stride);
            if constexpr (S::packs_factors) S::pack_factors(queries + r * query_stride, query_stride);
            if constexpr (is_rotated(D)) rotate(queries + r * query_stride, args.key_dim);
            if constexpr (is_quantized(D)) quantize_query<L, D>(queries + r * query_stride, query_stride);
            begins[r] = token.first_seen;
            ends[r] = token.position + 1;
            begin = begins[r] < begin ? begins[r] : begin;
            end = ends[r] > end ? ends[r] : end;
            const Partial partial(args.partials + (token.partials + args.split) * args.partial_stride +
                                  head * row_floats);
            outputs[r] = partial.output;
            for (int d = 0; d < padded_dim; d += L::width) L::store(partial.output + d, L::set1(0.0f));
        }
        sums.clear(rows);
        const int64_t split_begin = args.split * rworker::kSplitTokens;
        begin = begin > split_begin ? begin : split_begin;
        end = end < args.end ? end : args.end;
    }

    void run() {
        prepare();
        for (int64_t chunk = begin / chunk_size * chunk_size; chunk < end; chunk += chunk_size)
            attend_chunk(chunk, clip(begin, end, chunk, chunk_size));
        for (int r = 0; r < rows; ++r) {
            const auto partial = Partial<float>::of_output(outputs[r]);
            *partial.max = sums.max[r], *partial.sum = sums.sum[r];
            if constexpr (is_rotated(D)) rotate(outputs[r], args.value_dim);
        }
    }

    /// The tiles that are read one chunk later: of this call, and past its end of the next call. There are as many as
    /// this chunk has, so each tile's work prefetches one tile, however short the last chunk is. A call of one chunk
    /// prefetches the whole first chunk of the next call.
    Coming coming_after(int64_t chunk) const {
        const int64_t first = chunk / kTileTokens, own_end = tiles_of(end);
        const bool alone = chunk <= begin && first + chunk_tiles >= own_end;
        const int64_t from = alone ? own_end : first + chunk_tiles;
        const int64_t to = from + (alone || own_end - first > chunk_tiles ? chunk_tiles : own_end - first);
        Coming coming;
        coming.keys[0] = tile_of(args.view, first).keys;
        for (int64_t tile = from; tile < to && tile < own_end; ++tile) coming.add(tile_of(args.view, tile));
        if (to > own_end && last && args.next) add_next(coming, from - own_end, to - own_end);
        coming.key_lines = int((args.view.key_tile_bytes + kCacheLineBytes - 1) / kCacheLineBytes);
        coming.value_lines = int((args.view.value_tile_bytes + kCacheLineBytes - 1) / kCacheLineBytes);
        coming.read_ahead = args.read_ahead;
        const bool all = coming.num_tiles == chunk_tiles;  // parallel pages need a tile of each
        if (!all && coming.read_ahead == ReadAhead::pages) coming.read_ahead = ReadAhead::run;
        return coming;
    }

    /// Adds tiles `from` to `to` of the next call.
    void add_next(Coming& coming, int64_t from, int64_t to) const {
        const int64_t first = args.next->begin / kTileTokens, tiles = tiles_of(args.next->end) - first;
        for (int64_t tile = from > 0 ? from : 0; tile < to && tile < tiles; ++tile)
            coming.add(tile_of(args.next->view, first + tile));
    }

    static int64_t tiles_of(int64_t tokens) { return (tokens + kTileTokens - 1) / kTileTokens; }

    void attend_chunk(int64_t chunk, Range seen) {
        Tile tiles[chunk_tiles];
        const Range worked_on = is_quantized(D) ? whole_tiles(seen) : round_out(seen, L::width);
        find_tiles(chunk, seen, tiles);
        const Coming coming = coming_after(chunk);
        Ahead ahead(coming, row_groups<L, D>(rows), rows, rows > 2 ? kSoftmaxDims<S> : 0,
                    args.key_dim + args.value_dim);
        for_row_groups<L, D>(rows, [&]<int R>(int r) {
            score_rows<L, D, R>(tiles, seen, ahead, queries + r * query_stride, query_stride, key_lines, args.scale,
                                scores + r * chunk_size);
        });
        with_constant_range<chunk_size>(worked_on, [&](Range range) { soften(chunk, range, ahead); });
        for_row_groups<L, D>(rows, [&]<int R>(int r) {
            add_value_rows<L, D, R>(tiles, seen, ahead, scores + r * chunk_size, sums.keep + r, outputs + r,
                                    padded_dim);
        });
    }

    [[gnu::always_inline]] void soften(int64_t chunk, Range worked_on, Ahead& ahead) {
        const bool bent = args.soft_cap != 0.0f || args.alibi_slopes;
        for (int r = 0; r < rows; ++r) {
            if (bent) bend_scores(r, chunk, worked_on);
            sums.find_top(r, scores + r * chunk_size, worked_on, clip(begins[r], ends[r], chunk, chunk_size));
        }
        sums.renew_maxima(rows);
        for (int r = 0; r < rows; ++r) {
            ahead.ask_for_row();
            sums.template weigh_row<S>(r, scores + r * chunk_size, worked_on);
        }
        sums.renew_sums(rows);
    }

    /// Applies a soft cap, then ALiBi. It is outside the loop, so layers without them lose no time.
    [[gnu::noinline]] void bend_scores(int row, int64_t chunk, Range worked_on) const {
        float* const row_scores = scores + row * chunk_size;
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

/// Turns the keys of the last tile, which is not full, from rows to lanes. It writes them to the scratch, after a
/// RowBlock's part.
template <class L, DType D>
uint8_t* turn_open_keys(const AttendArgs& args) {
    using S = Stored<L, D>;
    using Word = StoredWord<S::lane_bytes>;
    const uint8_t* const open = tile_of(args.view, args.end / kTileTokens).keys;
    uint8_t* const tile = reinterpret_cast<uint8_t*>(args.scratch + rworker::open_tile_offset(args.key_dim));
    int header = 0;
    if constexpr (is_quantized(D)) header = key_header_bytes<D>(args.key_dim);
    __builtin_memcpy(tile, open, size_t(header));
    rows_to_lanes(reinterpret_cast<const Word*>(open + header), int(args.end % kTileTokens),
                  (args.key_dim + S::pack - 1) / S::pack, reinterpret_cast<Word*>(tile + header));
    __asm__ volatile("" ::: "memory");  // words were stored and will be loaded as floats
    return tile;
}

template <class L, DType D>
void attend(const AttendArgs& args) {
    uint8_t* const open_keys = args.end % kTileTokens != 0 ? turn_open_keys<L, D>(args) : nullptr;
    const int64_t rows = args.num_tokens * args.group;
    for (int64_t row = 0; row < rows; row += kBlockRows) RowBlock<L, D>(args, open_keys, row, rows - row).run();
}

}  // namespace
