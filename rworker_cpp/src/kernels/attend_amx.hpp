// Attention over bfloat16 tiles with products of tile registers: keys of 16 tokens in 32 dims, or values of 32 tokens
// in 16 dims.
#pragma once

#include "kernels/tile_rows.hpp"

namespace {

/// Stores floats rounded to nearest even; tokens or dims of `first` come before those of `second`.
inline void store_bfloats(void* to, __m512 first, __m512 second) {
    _mm512_store_si512(to, (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

struct BfloatTiles : TileRows {
    static constexpr int kRound = 32;  // dims of keys, or tokens of values, that a tile register takes
    static constexpr int kLines = 16;  // pairs of dims or tokens
    const int key_lines = (args.key_dim + 1) / 2, whole_rounds = key_lines / kLines;
    const int rounds = (key_lines + kLines - 1) / kLines;
    const int64_t value_line = value_dim * 4;
    uint8_t* const queries = reinterpret_cast<uint8_t*>(scratch);
    const uint8_t* values[kMaxChunkTiles / 2];  // of each 32 tokens of the chunk

    BfloatTiles(const AttendArgs& call, int64_t row, int64_t rows_left)
        : TileRows(call, DType::bfloat16, row, rows_left, kTileRows) {}

    // The tile registers of the rows, group by group and round by round: one line per row.
    uint8_t* query_tile(int group, int round) const {
        return queries + (group * rounds + round) * group_rows * kTileLine;
    }
    uint8_t* weight_tile(int group, int round) const {
        return weights + (group * (at.chunk_tokens / kRound) + round) * group_rows * kTileLine;
    }
    float* output_tile(int group, int block) const { return outputs + (group * blocks + block) * group_rows * 16; }

    void run() {
        if (args.end % kTileTokens != 0) turn_open_keys();
        prepare([&](int row, const float* query) {
            uint8_t* to = query_tile(row / group_rows, 0) + row % group_rows * kTileLine;
            for (int i = 0; i < rounds * kRound; i += kRound, to += group_rows * kTileLine)
                store_bfloats(to, _mm512_load_ps(query + i), _mm512_load_ps(query + i + 16));
        });
        configure_tiles(group_rows);
        for (int64_t first = begin / at.chunk_tokens * at.chunk_tokens; first < end; first += at.chunk_tokens)
            attend_chunk(first);
        for (int r = 0; r < rows; ++r) store_output(r, finish(r));
    }

    /// Turns the keys of the last tile, which is not full, from rows to lanes.
    void turn_open_keys() const {
        const uint8_t* const open = tile_of(args.view, args.end / kTileTokens).keys;
        rows_to_lanes(reinterpret_cast<const uint32_t*>(open), int(args.end % kTileTokens), key_lines,
                      reinterpret_cast<uint32_t*>(open_keys));
    }

    void attend_chunk(int64_t first) {
        open_chunk(first);
        const Range tiles{chunk.seen.begin / kTileTokens, (chunk.seen.end + kTileTokens - 1) / kTileTokens};
        const Range worked_on = round_out(chunk.seen, kRound);
        const int tokens = worked_on.end - worked_on.begin, row_units = tokens / 20 + 1;
        start_feed(groups * ((tiles.end - tiles.begin) * rounds + tokens / kRound * blocks) + rows * row_units);
        finish_stores();
        for (int tile = tiles.begin; tile < tiles.end; tile += kSumTiles)
            with_count(tiles.end - tile, [&]<int Count>() { score_tiles<Count>(tile, tiles.end); });
        for (int g = 0; g < groups; ++g)
            soften(
                g, worked_on, row_units, [&](int row, __m512 base) { return weigh(g, row, worked_on, base); },
                [&](int row, float keep) { shrink_output(g, row, keep); });
        find_values(worked_on);
        finish_stores();
        for (int block = 0; block < blocks; block += kSumTiles)
            with_count(blocks - block, [&]<int Count>() { add_values<Count>(block, worked_on); });
    }

    /// Computes scores of all rows with `Count` tiles of keys. The first group of rows loads the tiles into the
    /// first-level cache.
    template <int Count>
    [[gnu::noinline]] void score_tiles(int tile, int end_tile) {
        const uint8_t *keys[Count], *soon[Count];
        for (int i = 0; i < Count; ++i) {
            keys[i] = chunk.tiles[tile + i].keys;
            soon[i] = tile + kSumTiles + i < end_tile ? chunk.tiles[tile + kSumTiles + i].keys : keys[i];
            if (whole_rounds < rounds) copy_tail(keys[i], key_tails + i * kTileBytes);
        }
        finish_stores();
        for (int g = 0; g < groups; ++g) {
            for_each_sum<Count>([]<int I>() __attribute__((always_inline)) { clear_sum<I>(); });
            for_each_round(0, whole_rounds, [&]<int Turn>(int round) __attribute__((always_inline)) {
                load_tile<kRowTile>(query_tile(g, round), kTileLine);
                for_each_sum<Count>([&]<int I>() __attribute__((always_inline)) {
                    const uint8_t* const data = keys[I] + round * kTileBytes;
                    if (g == 0) fetch_tile(round + 1 < whole_rounds ? data + kTileBytes : soon[I], kTileLine);
                    multiply<I, Turn>(data, kTileLine);
                });
            });
            if (whole_rounds < rounds) {
                load_tile<kRowTile>(query_tile(g, whole_rounds), kTileLine);
                for_each_sum<Count>([&]<int I>() __attribute__((always_inline)) {
                    multiply<I, 0>(key_tails + I * kTileBytes, kTileLine);
                });
            }
            float* const to = scores + g * group_rows * at.score_stride + tile * kTileTokens;
            for_each_sum<Count>([&]<int I>() __attribute__((always_inline)) {
                store_sum<I>(to + I * kTileTokens, at.score_stride * 4);
            });
        }
    }

    /// Copies the lines of keys that do not fill a round, and fills up with zeros.
    void copy_tail(const uint8_t* keys, uint8_t* tail) const {
        const int lines = key_lines - whole_rounds * kLines;
        __builtin_memcpy(tail, keys + whole_rounds * kTileBytes, size_t(lines) * kTileLine);
        __builtin_memset(tail + lines * kTileLine, 0, size_t(kLines - lines) * kTileLine);
    }

    /// sum I += the row tile x the data at `data`.
    template <int I, int Turn>
    [[gnu::always_inline]] void multiply(const uint8_t* data, int64_t stride) {
        constexpr int cache_tile = kFirstCacheTile + (Turn + I) % kCacheTiles;
        load_tile<cache_tile>(data, stride);
        add_bfloat_products<I, cache_tile>();
        feed.ask();
    }

    /// Turns the exponents of a group's row into weights; returns their sums by lane.
    __m512 weigh(int group, int row, Range worked_on, __m512 base) const {
        const float* const exponents = scores + (group * group_rows + row) * at.score_stride;
        uint8_t* to = weight_tile(group, worked_on.begin / kRound) + row * kTileLine;
        const int64_t tile_bytes = group_rows * kTileLine;
        __m512 total = _mm512_setzero_ps();
        for (int t = worked_on.begin; t < worked_on.end; t += kRound) {
            const __m512 a = exp2_nonpositive(_mm512_sub_ps(_mm512_load_ps(exponents + t), base));
            const __m512 b = exp2_nonpositive(_mm512_sub_ps(_mm512_load_ps(exponents + t + 16), base));
            store_bfloats(to, a, b);
            to += tile_bytes;
            total = _mm512_add_ps(total, _mm512_add_ps(a, b));
        }
        return total;
    }

    void shrink_output(int group, int row, float keep) const {
        float* output = output_tile(group, 0) + row * 16;
        for (int b = 0; b < blocks; ++b, output += group_rows * 16)
            _mm512_store_ps(output, _mm512_mul_ps(_mm512_load_ps(output), _mm512_set1_ps(keep)));
    }

    /// Finds the values of each 32 tokens. They are in their block, or in a copy if they are not neighbours or not all
    /// seen. The copy has zeros for unseen tokens, since a weight of 0 times an old NaN is NaN.
    void find_values(Range worked_on) {
        const Range pairs = round_out(chunk.seen, 2);
        for (int t = worked_on.begin; t < worked_on.end; t += kRound) {
            const uint8_t* const first = chunk.tiles[t / kTileTokens].values;
            if (t >= pairs.begin && t + kRound <= pairs.end &&
                chunk.tiles[t / kTileTokens + 1].values == first + args.view.value_tile_bytes)
                values[t / kRound] = first;
            else
                values[t / kRound] = copy_values(t, pairs);
        }
    }

    const uint8_t* copy_values(int first, Range pairs) const {
        uint8_t* const copy = copied_values + first / 2 * value_line;
        for (int t = first; t < first + kRound; t += 2) {
            uint8_t* const line = copy + (t - first) / 2 * value_line;
            if (t >= pairs.begin && t < pairs.end)
                __builtin_memcpy(line, chunk.tiles[t / kTileTokens].values + t % kTileTokens / 2 * value_line,
                                 size_t(value_line));
            else
                __builtin_memset(line, 0, size_t(value_line));
        }
        return copy;
    }

    /// outputs += weights x values in `Count` blocks of 16 dims.
    template <int Count>
    [[gnu::noinline]] void add_values(int block, Range worked_on) {
        const int first = worked_on.begin / kRound, last_round = worked_on.end / kRound - 1;
        for (int g = 0; g < groups; ++g) {
            float* const output = output_tile(g, block);
            for_each_sum<Count>([&]<int I>() __attribute__((always_inline)) {
                load_tile<I>(output + I * group_rows * 16, kTileLine);
            });
            for_each_round(first, last_round + 1, [&]<int Turn>(int round) __attribute__((always_inline)) {
                load_tile<kRowTile>(weight_tile(g, round), kTileLine);
                const uint8_t* const data = values[round] + block * kTileLine;
                const uint8_t* const soon = round < last_round ? values[round + 1] + block * kTileLine
                                                               : values[first] + (block + kSumTiles) * kTileLine;
                for_each_sum<Count>([&]<int I>() __attribute__((always_inline)) {
                    if (g == 0) fetch_tile(soon + I * kTileLine, value_line);
                    multiply<I, Turn>(data + I * kTileLine, value_line);
                });
            });
            for_each_sum<Count>([&]<int I>() __attribute__((always_inline)) {
                store_sum<I>(output + I * group_rows * 16, kTileLine);
            });
        }
    }

    void store_output(int row, float* to) const {
        const float* output = output_tile(row / group_rows, 0) + row % group_rows * 16;
        for (int b = 0; b < blocks; ++b, output += group_rows * 16)
            _mm512_storeu_ps(to + b * 16, _mm512_load_ps(output));
    }
};

template <class Tiles>
void attend_tiles(const AttendArgs& args) {
    const int64_t rows = args.num_tokens * args.group;
    for (int64_t row = 0; row < rows; row += kBlockRows) Tiles(args, row, rows - row).run();
}

}  // namespace
