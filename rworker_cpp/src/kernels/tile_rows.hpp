// What all kernels of tile registers share: their rows, the chunks that rows see, and the layout of both.
//
// There is one path for any number of rows, so a row's bits do not depend on the other rows. Each sum takes the same
// operands in the same order, and unseen tokens have weight 0, which adds nothing.
#pragma once

#include "kernels/attend.hpp"
#include "kernels/tile_feed.hpp"
#include "kernels/tile_softmax.hpp"
#include "kernels/tiles.hpp"

namespace {

using rworker::TileScratch;

constexpr int kMaxRowGroups = 8;

/// A chunk: the part that the rows see together, its tiles, and those of the next chunk.
struct TileChunk {
    int64_t first;  // token
    Range seen;     // relative to `first`, like all tokens below
    Tile tiles[kMaxChunkTiles], next[kMaxChunkTiles];
};

/// Up to kBlockRows query rows over a split, cut evenly into groups that fill a tile register. The last rows of a group
/// may be unused.
struct TileRows {
    const AttendArgs& args;
    const int64_t first_row;
    const int rows, groups, group_rows;
    const bool last;  // of the blocks
    const TileScratch at;
    const int value_dim = round_up16(args.value_dim), blocks = value_dim / 16;
    float* const scratch = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(args.scratch) + 63) / 64 * 64);
    float* const scores = scratch + at.scores;
    uint8_t* const weights = reinterpret_cast<uint8_t*>(scratch + at.weights);
    float* const outputs = scratch + at.outputs;
    float* const sums = scratch + at.sums;
    uint8_t* const open_keys = reinterpret_cast<uint8_t*>(scratch + at.open_keys);
    uint8_t* const key_tails = reinterpret_cast<uint8_t*>(scratch + at.key_tails);
    uint8_t* const copied_values = reinterpret_cast<uint8_t*>(scratch + at.values);
    RowMaxima maxima[kMaxRowGroups];
    float* partials[kBlockRows];
    int64_t begins[kBlockRows], ends[kBlockRows];  // the tokens a row sees
    int64_t begin = args.end, end = 0;
    TileChunk chunk;
    Feed feed;

    TileRows(const AttendArgs& call, DType dtype, int64_t row, int64_t rows_left, int most_group_rows)
        : args(call),
          first_row(row),
          rows(int(rows_left < kBlockRows ? rows_left : kBlockRows)),
          groups((rows + most_group_rows - 1) / most_group_rows),
          group_rows((rows + groups - 1) / groups),
          last(rows_left <= kBlockRows),
          at(dtype, call.key_dim, call.value_dim) {}

    /// Calls pack(row, query) with a query's floats and zeros after them, and sets what rows see and start with.
    template <class Pack>
    void prepare(Pack pack) {
        alignas(64) float query[rworker::kMaxHeadDim + 64] = {};
        int64_t index = first_row / args.group, head = first_row % args.group;
        for (int r = 0; r < rows; ++r, head = head + 1 < args.group ? head + 1 : (++index, 0)) {
            const TokenRow& token = args.tokens[index];
            const int64_t place = token.payload_row * args.token_stride + head * args.key_dim;
            widen_row<Avx512>(args.dtype, element(args.dtype, args.queries, place), args.key_dim, 1.0f, query);
            pack(r, query);
            begins[r] = token.first_seen;
            ends[r] = token.position + 1;
            begin = begins[r] < begin ? begins[r] : begin;
            end = ends[r] > end ? ends[r] : end;
            partials[r] = args.partials + (token.partials + args.split) * args.partial_stride +
                          head * rworker::partial_floats(args.value_dim);
        }
        const int64_t split_begin = args.split * rworker::kSplitTokens;
        begin = begin > split_begin ? begin : split_begin;
        end = end < args.end ? end : args.end;
        for (int g = 0; g < groups; ++g) maxima[g].clear();
        for (int i = 0; i < groups * group_rows * value_dim; i += 16) _mm512_store_ps(outputs + i, _mm512_setzero_ps());
        for (int i = 0; i < rows * 16; i += 16) _mm512_store_ps(sums + i, _mm512_setzero_ps());
    }

    int in_chunk(int64_t token) const {
        const int64_t relative = token - chunk.first;
        return int(relative < 0 ? 0 : relative > at.chunk_tokens ? at.chunk_tokens : relative);
    }

    Range seen_of(int row) const {
        const Range seen{in_chunk(begins[row]), in_chunk(ends[row])};
        return seen.begin < seen.end ? seen : Range{0, 0};
    }

    /// Finds the chunk from `first` on, and the next one: of this split, or the first of the next call.
    void open_chunk(int64_t first) {
        chunk.first = first;
        chunk.seen = {in_chunk(begin), in_chunk(end)};
        find_tiles(args.view, first + chunk.seen.begin, first + chunk.seen.end,
                   chunk.tiles + chunk.seen.begin / kTileTokens);
        if (first + chunk.seen.end > args.end / kTileTokens * kTileTokens)
            chunk.tiles[(chunk.seen.end - 1) / kTileTokens].keys = open_keys;
    }

    /// Begins to prefetch the next chunk, over `units` of work on this one.
    void start_feed(int64_t units) {
        const HeadView* view = &args.view;
        int64_t from = chunk.first + at.chunk_tokens, to = end;
        if (from >= to) {
            if (!last || !args.next) return feed.start(chunk.next, 0, 0, 0, 1);
            view = &args.next->view, from = args.next->begin, to = args.next->end;
        }
        const int64_t chunk_end = (from / at.chunk_tokens + 1) * at.chunk_tokens;
        const int count = find_tiles(*view, from, to < chunk_end ? to : chunk_end, chunk.next);
        feed.start(chunk.next, count, view->key_tile_bytes, view->value_tile_bytes, units);
    }

    /// Finds the tiles of tokens [from, to); returns their number.
    static int find_tiles(const HeadView& view, int64_t from, int64_t to, Tile* tiles) {
        int count = 0;
        for (int64_t tile = from / kTileTokens; tile * kTileTokens < to; ++tile) tiles[count++] = tile_of(view, tile);
        return count;
    }

    int rows_in(int group) const {
        const int left = rows - group * group_rows;
        return left < group_rows ? left : group_rows;
    }

    /// Turns a row's scores into exponents of two, -inf for unseen tokens; returns the largest in each lane.
    __m512 scale_scores(int row, Range worked_on) const {
        float* const row_scores = scores + row * at.score_stride;
        const Range seen = seen_of(row);
        if (args.soft_cap != 0.0f) {
            multiply_row(row_scores, worked_on, args.scale);
            cap_scores<Avx512>(row_scores, worked_on, args.soft_cap);
            multiply_row(row_scores, worked_on, kLog2E);
        } else {
            multiply_row(row_scores, worked_on, args.scale * kLog2E);
        }
        if (args.alibi_slopes)
            add_slope<Avx512>(row_scores, worked_on, args.alibi_slopes[(first_row + row) % args.group] * kLog2E,
                              float(chunk.first + 1 - ends[row]));
        if (seen.begin > worked_on.begin || seen.end < worked_on.end) hide_unseen<Avx512>(row_scores, worked_on, seen);
        __m512 top = _mm512_set1_ps(-kInfinity);
        for (int t = worked_on.begin; t < worked_on.end; t += 16)
            top = _mm512_max_ps(top, _mm512_load_ps(row_scores + t));
        return top;
    }

    static void multiply_row(float* row, Range tokens, float factor) {
        for (int t = tokens.begin; t < tokens.end; t += 16)
            _mm512_store_ps(row + t, _mm512_mul_ps(_mm512_load_ps(row + t), _mm512_set1_ps(factor)));
    }

    /// Turns scores of a group's rows into weights: calls weigh(row in the group, base), which returns their sum by
    /// lanes. Then it calls shrink(row in the group, factor) where older outputs weigh less from now on.
    template <class Weigh, class Shrink>
    void soften(int group, Range worked_on, int row_units, Weigh weigh, Shrink shrink) {
        __m512 tops[kTileRows];
        const int first = group * group_rows, count = rows_in(group);
        for (int i = 0; i < count; ++i) tops[i] = scale_scores(first + i, worked_on);
        for (int i = count; i < kTileRows; ++i) tops[i] = _mm512_set1_ps(-kInfinity);
        maxima[group].renew(tops);
        for (int i = 0; i < count; ++i) {
            const float keep = maxima[group].keep[i];
            float* const sum = sums + (first + i) * 16;
            const __m512 total = weigh(i, _mm512_set1_ps(maxima[group].base[i]));
            _mm512_store_ps(sum, _mm512_fmadd_ps(_mm512_load_ps(sum), _mm512_set1_ps(keep), total));
            if (keep != 1.0f) shrink(i, keep);
            feed.ask(row_units);
        }
    }

    /// Writes max and sum of a row's partial result; returns where its output goes.
    float* finish(int row) const {
        const Partial partial(partials[row]);
        *partial.max = maxima[row / group_rows].max[row % group_rows] * kLn2;
        *partial.sum = Avx512::reduce_add(_mm512_load_ps(sums + row * 16));
        return partial.output;
    }
};

}  // namespace
