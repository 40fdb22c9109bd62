// Scores of an index layer's queries over one split: of each token, or of blocks of tokens by each head.
//
// As in attention, a score has the same bits whatever runs beside it: heads are added in their order.
#pragma once

#include "kernels/attend.hpp"

namespace {

/// Several of one query's heads, widened and scaled, over the chunks of a split.
template <class L, DType D>
struct HeadScores {
    using S = Stored<L, D>;
    const AttendArgs& args;
    uint8_t* const open_keys;
    const int query_stride = round_up16(args.key_dim), key_lines = (args.key_dim + S::pack - 1) / S::pack;
    float* const queries = args.scratch;
    float* const scores = queries + kBlockRows * query_stride;
    float weights[kBlockRows];

    HeadScores(const AttendArgs& call, uint8_t* open_keys_in_lanes) : args(call), open_keys(open_keys_in_lanes) {}

    /// `out`: of the query in this split; `first`: the first of the heads.
    void run(const TokenRow& token, int first, int heads, float* out) {
        const int query_dim = args.key_dim + (args.pick_block ? 0 : 2);
        for (int h = 0; h < heads; ++h) {
            const int64_t at = token.payload_row * args.token_stride + int64_t(first + h) * query_dim;
            const void* const query = element(args.dtype, args.queries, at);
            float* const row = queries + h * query_stride;
            widen_row<L>(args.dtype, query, args.key_dim, S::packs_factors ? 1.0f : args.scale, row);
            if constexpr (S::packs_factors) S::pack_factors(row, query_stride);
            if (!args.pick_block) __builtin_memcpy(weights + h, element(args.dtype, query, args.key_dim), sizeof(float));
        }
        const int64_t begin = args.split * rworker::kSplitTokens;
        for (int64_t chunk = begin; chunk < args.end; chunk += kChunkTokens) {
            score_chunk(chunk, heads);
            if (args.pick_block)
                find_maxima(chunk - begin, first, heads, out);
            else
                add_heads(chunk - begin, heads, out);
        }
    }

    void score_chunk(int64_t chunk, int heads) {
        Tile tiles[kChunkTokens / kTileTokens];
        const Range seen = clip(0, args.end, chunk, kChunkTokens);
        for (int i = 0; i * kTileTokens < seen.end; ++i) {
            tiles[i] = tile_of(args.view, chunk / kTileTokens + i);
            if (chunk + (i + 1) * kTileTokens > args.end) tiles[i].keys = open_keys;
        }
        const Coming coming = coming_after(chunk);
        Ahead ahead(coming, row_groups<L, D>(heads));
        for_row_groups<L, D>(heads, [&]<int R>(int h) {
            score_rows<L, D, R>(tiles, seen, ahead, queries + h * query_stride, query_stride, key_lines, args.scale,
                                scores + h * kChunkTokens);
        });
    }

    /// The keys of the next chunk, of this split or of the next call, each tile as two halves.
    Coming coming_after(int64_t chunk) const {
        Coming coming;
        coming.keys[0] = tile_of(args.view, chunk / kTileTokens).keys;
        coming.key_lines = coming.value_lines = int(args.view.key_tile_bytes / 2 / kCacheLineBytes);
        coming.read_ahead = args.read_ahead == ReadAhead::pages ? ReadAhead::run : args.read_ahead;
        const bool here = chunk + kChunkTokens < args.end;
        if ((!here && !args.next) || coming.key_lines == 0) return coming;
        const HeadView& view = here ? args.view : args.next->view;
        const int64_t first = here ? chunk + kChunkTokens : args.next->begin, end = here ? args.end : args.next->end;
        for (int64_t tile = first / kTileTokens; tile * kTileTokens < end && coming.num_tiles < kChunkTokens / kTileTokens; ++tile) {
            uint8_t* const keys = tile_of(view, tile).keys;
            coming.add({keys, keys + coming.key_lines * kCacheLineBytes});
        }
        return coming;
    }

    /// out[token] += the sum of weight * relu(score).
    void add_heads(int64_t token, int heads, float* out) const {
        for (int t = 0; t < kChunkTokens; t += L::width) {
            auto sum = L::load(out + token + t);
            for (int h = 0; h < heads; ++h) {
                const auto positive = L::max(L::load(scores + h * kChunkTokens + t), L::set1(0.0f));
                sum = L::fma(L::set1(weights[h]), positive, sum);
            }
            L::store(out + token + t, sum);
        }
    }

    /// out[head][block] = the largest score of the block's tokens.
    void find_maxima(int64_t token, int first, int heads, float* out) const {
        const int64_t blocks = rworker::kSplitTokens / args.pick_block;
        for (int h = 0; h < heads; ++h)
            for (int64_t t = 0; t < kChunkTokens; t += kTileTokens) {
                auto largest = L::set1(-kInfinity);
                for (int v = 0; v < kTileTokens; v += L::width)
                    largest = L::max(largest, L::load(scores + h * kChunkTokens + t + v));
                float* const block = out + (first + h) * blocks + (token + t) / args.pick_block;
                const float found = L::reduce_max(largest);
                if ((token + t) % args.pick_block == 0 || found > *block) *block = found;
            }
    }
};

template <class L, DType D>
void score(const AttendArgs& args) {
    uint8_t* const open_keys = args.end % kTileTokens != 0 ? turn_open_keys<L, D>(args) : nullptr;
    HeadScores<L, D> split(args, open_keys);
    for (int64_t i = 0; i < args.num_tokens; ++i) {
        float* const out = args.partials + (args.tokens[i].partials + args.split) * args.partial_stride;
        for (int t = 0; args.pick_block == 0 && t < rworker::kSplitTokens; t += L::width) L::store(out + t, L::set1(0.0f));
        for (int first = 0; first < args.group; first += kBlockRows)
            split.run(args.tokens[i], first, args.group - first < kBlockRows ? args.group - first : kBlockRows, out);
    }
}

}  // namespace
