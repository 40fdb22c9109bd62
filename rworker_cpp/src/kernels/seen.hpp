// Scores of queries with single tokens, as attention has them before its softmax, and a softmax over whole rows of
// them. They serve the few rows whose attention weights are asked for.
#pragma once

#include "kernels/attend.hpp"

namespace {

/// Up to kBlockRows query rows over all chunks of the split; values are not read.
template <class L, DType D>
struct SeenScores : RowBlock<L, D> {
    using Block = RowBlock<L, D>;
    using Block::args, Block::begin, Block::begins, Block::chunk_size, Block::end, Block::ends, Block::first_row,
        Block::key_lines, Block::queries, Block::query_stride, Block::rows, Block::scores;

    using Block::Block;

    void run() {
        Block::prepare();
        for (int64_t chunk = begin / chunk_size * chunk_size; chunk < end; chunk += chunk_size)
            score_chunk(chunk, clip(begin, end, chunk, chunk_size));
    }

    void score_chunk(int64_t chunk, Range seen) {
        Tile tiles[Block::chunk_tiles];
        this->find_tiles(chunk, seen, tiles);
        const Coming coming = keys_after(chunk);
        Ahead ahead(coming, row_groups<L, D>(rows));
        for_row_groups<L, D>(rows, [&]<int R>(int r) {
            score_rows<L, D, R>(tiles, seen, ahead, queries + r * query_stride, query_stride, key_lines, args.scale,
                                scores + r * chunk_size);
        });
        const Range worked_on = is_quantized(D) ? whole_tiles(seen) : round_out(seen, L::width);
        for (int r = 0; r < rows; ++r) {
            if (args.soft_cap != 0.0f || args.alibi_slopes) this->bend_scores(r, chunk, worked_on);
            const Range own = clip(begins[r], ends[r] < end ? ends[r] : end, chunk, chunk_size);
            const float* const from = scores + r * chunk_size;
            float* const to = args.partials + (first_row + r) * args.partial_stride + chunk;
            for (int t = own.begin; t < own.end; ++t) to[t] = from[t];
        }
    }

    /// The keys of this split's next chunk, each tile as two halves.
    Coming keys_after(int64_t chunk) const {
        Coming coming;
        coming.keys[0] = tile_of(args.view, chunk / kTileTokens).keys;
        coming.key_lines = coming.value_lines = int(args.view.key_tile_bytes / 2 / kCacheLineBytes);
        coming.read_ahead = args.read_ahead == ReadAhead::pages ? ReadAhead::run : args.read_ahead;
        if (coming.key_lines == 0) return coming;
        for (int64_t tile = chunk / kTileTokens + Block::chunk_tiles;
             tile * kTileTokens < end && coming.num_tiles < Block::chunk_tiles; ++tile) {
            uint8_t* const keys = tile_of(args.view, tile).keys;
            coming.add({keys, keys + coming.key_lines * kCacheLineBytes});
        }
        return coming;
    }
};

template <class L, DType D>
void see(const AttendArgs& args) {
    uint8_t* const open_keys = args.end % kTileTokens != 0 ? turn_open_keys<L, D>(args) : nullptr;
    const int64_t rows = args.num_tokens * args.group;
    for (int64_t row = 0; row < rows; row += kBlockRows) SeenScores<L, D>(args, open_keys, row, rows - row).run();
}

template <class L>
float largest(const float* scores, int64_t count) {
    auto found = L::set1(-kInfinity);
    for (int64_t i = 0; i < count; i += L::width) found = L::max(found, L::load(scores + i));
    return L::reduce_max(found);
}

template <class L>
void exponentiate(float* scores, int64_t count, float max) {
    for (int64_t i = 0; i < count; i += L::width)
        L::store(scores + i, exp_nonpositive_one<L>(L::sub(L::load(scores + i), L::set1(max))));
}

}  // namespace
