// Attention over int8 and int4 tiles with products of tile registers, as bytes: keys of 16 tokens in 64 dims, or values
// of 64 tokens in 16 dims. A factor of 15 or 16 bits is cut into two bytes, each in a row of a tile: first the high
// bytes of a group of up to 8 rows, then the low bytes.
#pragma once

#include "kernels/code_factors.hpp"

namespace {

template <DType D>
struct CodeTiles : TileRows {
    static constexpr int kRound = 64;  // dims of keys, or tokens of values, that a tile register takes
    static constexpr int kLines = 16;  // groups of four dims or tokens
    static constexpr bool kNibbles = D == DType::int4;
    const int key_lines = (args.key_dim + Stored<Avx512, D>::pack - 1) / Stored<Avx512, D>::pack;
    const int rounds = (args.key_dim + kRound - 1) / kRound, whole_rounds = kNibbles ? rounds : key_lines / kLines;
    const int key_header = key_header_bytes<D>(args.key_dim), value_header = header_bytes<D>(args.value_dim);
    const int64_t value_line = value_dim * 4, tile_bytes = 2 * group_rows * kTileLine;
    uint8_t* const queries = reinterpret_cast<uint8_t*>(scratch);
    QueryTerms terms[kBlockRows][kNibbles ? rworker::kMaxHeadDim / kRound : 1];
    WeightTerms weight_terms[kBlockRows];
    alignas(64) int32_t products[kSumTiles][kTileRows * 16];

    CodeTiles(const AttendArgs& call, int64_t row, int64_t rows_left)
        : TileRows(call, D, row, rows_left, kTileRows / 2) {}

    uint8_t* query_tile(int group, int round) const { return queries + (group * rounds + round) * tile_bytes; }
    uint8_t* weight_tile(int group, int round) const {
        return weights + (group * (at.chunk_tokens / kRound) + round) * tile_bytes;
    }

    void run() {
        if (args.end % kTileTokens != 0) turn_open_keys();
        prepare([&](int row, float* query) { pack_query(row, query); });
        configure_tiles(2 * group_rows);
        for (int64_t first = begin / at.chunk_tokens * at.chunk_tokens; first < end; first += at.chunk_tokens)
            attend_chunk(first);
        for (int r = 0; r < rows; ++r) {
            float* const output = finish(r);
            __builtin_memcpy(output, outputs + r * value_dim, size_t(value_dim) * sizeof(float));
            if constexpr (is_rotated(D)) rotate(output, args.value_dim);
        }
    }

    /// Turns the keys of the last tile, which is not full, from rows to lanes.
    void turn_open_keys() const {
        const uint8_t* const open = tile_of(args.view, args.end / kTileTokens).keys;
        __builtin_memcpy(open_keys, open, size_t(key_header));
        rows_to_lanes(reinterpret_cast<const uint32_t*>(open + key_header), int(args.end % kTileTokens), key_lines,
                      reinterpret_cast<uint32_t*>(open_keys + key_header));
    }

    /// int4 codes have scales for each round, so their factors have too.
    void pack_query(int row, float* query) {
        if constexpr (is_rotated(D)) rotate(query, args.key_dim);
        uint8_t* const line = query_tile(row / group_rows, 0) + row % group_rows * kTileLine;
        const int together = kNibbles ? 1 : rounds;
        for (int i = 0; i < rounds; i += together)
            terms[row][i] = cut_query(query + i * kRound, together, line + i * tile_bytes, tile_bytes,
                                      line + i * tile_bytes + group_rows * kTileLine);
    }

    void attend_chunk(int64_t first) {
        open_chunk(first);
        const Range worked_on = whole_tiles(chunk.seen), covered = round_out(chunk.seen, kRound);
        const Range tiles{worked_on.begin / kTileTokens, worked_on.end / kTileTokens};
        const int row_units = (worked_on.end - worked_on.begin) / 8 + 1;  // softmax, and cutting the weights
        start_feed(groups * ((tiles.end - tiles.begin) * rounds + (covered.end - covered.begin) / kRound * blocks) +
                   rows * row_units);
        finish_stores();
        for (int tile = tiles.begin; tile < tiles.end; tile += kSumTiles)
            with_count(tiles.end - tile, [&]<int Count>() { score_tiles<Count>(tile, tiles.end); });
        for (int g = 0; g < groups; ++g)
            soften(
                g, worked_on, row_units, [&](int row, __m512 base) { return weigh(g, row, worked_on, base); },
                [](int, float) {});
        gather_values(tiles);
        for (int block = 0; block < blocks; block += kSumTiles) {
            if (kNibbles || block == 0) cut_weights(block / kSumTiles, worked_on, covered);
            finish_stores();
            with_count(blocks - block, [&]<int Count>() { add_values<Count>(block, covered); });
        }
    }

    /// Computes scores of all rows with `Count` tiles of keys. The first group of rows loads the tiles into the
    /// first-level cache.
    template <int Count>
    [[gnu::noinline]] void score_tiles(int tile, int end_tile) {
        const uint8_t *keys[Count], *soon[Count];
        for (int i = 0; i < Count; ++i) {
            const uint8_t* const data = chunk.tiles[tile + i].keys + key_header;
            uint8_t* const copy = key_tails + i * rounds * kTileBytes;
            keys[i] = kNibbles ? copy : data;
            soon[i] = tile + kSumTiles + i < end_tile ? chunk.tiles[tile + kSumTiles + i].keys + key_header : data;
            if (kNibbles)
                split_keys(data, key_lines, copy);
            else if (whole_rounds < rounds)
                __builtin_memcpy(copy, data + whole_rounds * kTileBytes,
                                 size_t(key_lines - whole_rounds * kLines) * kTileLine);
        }
        finish_stores();
        for (int g = 0; g < groups; ++g) {
            if constexpr (!kNibbles) clear_sums<Count>();
            for_each_round(0, whole_rounds, [&]<int Turn>(int round) __attribute__((always_inline)) {
                if constexpr (kNibbles) clear_sums<Count>();
                load_tile<kRowTile>(query_tile(g, round), kTileLine);
                for_each_sum<Count>([&]<int I>() __attribute__((always_inline)) {
                    const uint8_t* const data = keys[I] + round * kTileBytes;
                    if (!kNibbles && g == 0)
                        fetch_tile(round + 1 < whole_rounds ? data + kTileBytes : soon[I], kTileLine);
                    multiply_keys<I, Turn>(data);
                });
                if constexpr (kNibbles) finish_scores<Count>(g, tile, round);
            });
            if (whole_rounds < rounds) {  // bytes after the last keys are multiplied by zeros
                load_tile<kRowTile>(query_tile(g, whole_rounds), kTileLine);
                for_each_sum<Count>([&]<int I>() __attribute__((always_inline)) {
                    multiply_keys<I, 0>(key_tails + I * rounds * kTileBytes);
                });
            }
            if constexpr (!kNibbles) finish_scores<Count>(g, tile, 0);
        }
    }

    template <int Count>
    [[gnu::always_inline]] static void clear_sums() {
        for_each_sum<Count>([]<int I>() __attribute__((always_inline)) { clear_sum<I>(); });
    }

    template <int Count>
    [[gnu::always_inline]] void store_sums() {
        for_each_sum<Count>([&]<int I>() __attribute__((always_inline)) { store_sum<I>(products[I], kTileLine); });
    }

    template <int I, int Turn>
    [[gnu::always_inline]] void multiply_keys(const uint8_t* data) {
        constexpr int cache_tile = kFirstCacheTile + (Turn + I) % kCacheTiles;
        load_tile<cache_tile>(data, kTileLine);
        add_signed_products<I, cache_tile>();
        feed.ask();
    }

    /// Turns sums into scores: all of them, or those of int4's current round, added to earlier rounds.
    template <int Count>
    [[gnu::always_inline]] void finish_scores(int group, int tile, int round) {
        store_sums<Count>();
        for (int row = 0; row < rows_in(group); ++row) {
            float* const to = scores + (group * group_rows + row) * at.score_stride + tile * kTileTokens;
            const QueryTerms& factors = terms[group * group_rows + row][round];
            RWORKER_UNROLL
            for (int i = 0; i < Count; ++i) {
                const __m512i sum = join_bytes<7>(products[i] + row * 16, products[i] + (group_rows + row) * 16);
                const uint8_t* const header = chunk.tiles[tile + i].keys + round * kHeaderLineBytes;
                if constexpr (kNibbles)
                    add_int4_scores(sum, factors, header, round, to + i * kTileTokens);
                else
                    store_int8_scores(sum, factors, header, to + i * kTileTokens);
            }
        }
    }

    /// Turns a row's exponents into weights, in place; returns their sums by lane.
    __m512 weigh(int group, int row, Range worked_on, __m512 base) const {
        float* const exponents = scores + (group * group_rows + row) * at.score_stride;
        __m512 total = _mm512_setzero_ps();
        for (int t = worked_on.begin; t < worked_on.end; t += 16) {
            const __m512 weight = exp2_nonpositive(_mm512_sub_ps(_mm512_load_ps(exponents + t), base));
            _mm512_store_ps(exponents + t, weight);
            total = _mm512_add_ps(total, weight);
        }
        return total;
    }

    /// Multiplies all rows' weights by the scales of their tokens, for the dims of a `quartet` of blocks, and cuts them
    /// into two bytes each.
    void cut_weights(int quartet, Range worked_on, Range covered) {
        const int header = kNibbles ? quartet * kHeaderLineBytes : 0;
        for (int g = 0; g < groups; ++g)
            for (int row = 0; row < rows_in(g); ++row) {
                uint8_t* const line = weight_tile(g, covered.begin / kRound) + row * kTileLine;
                weight_terms[g * group_rows + row] =
                    cut_row<D>(scores + (g * group_rows + row) * at.score_stride, chunk.tiles, header, worked_on,
                               covered, line, tile_bytes, line + group_rows * kTileLine);
            }
    }

    /// Gathers the codes of all values without the scales between them. A register takes four tiles; copying is cheaper
    /// than four registers of which three quarters are empty. Tiles that no row sees get weight 0, whatever they hold.
    void gather_values(Range tiles) const {
        for (int tile = tiles.begin; tile < tiles.end; ++tile) {
            const uint8_t* const codes = chunk.tiles[tile].values + value_header;
            uint8_t* const copy = copied_values + tile * 4 * value_line;
            if constexpr (kNibbles)
                split_nibbles(codes, 2, blocks, copy);
            else
                __builtin_memcpy(copy, codes, size_t(4 * value_line));
        }
    }

    /// outputs = outputs * keep + weights x values in `Count` blocks of 16 dims.
    template <int Count>
    [[gnu::noinline]] void add_values(int block, Range covered) {
        for (int g = 0; g < groups; ++g) {
            clear_sums<Count>();
            for_each_round(covered.begin / kRound, covered.end / kRound, [&]<int Turn>(int round) __attribute__((
                                                                             always_inline)) {
                load_tile<kRowTile>(weight_tile(g, round), kTileLine);
                const uint8_t* const data = copied_values + round * kLines * value_line + block * kTileLine;
                for_each_sum<Count>([&]<int I>() __attribute__((always_inline)) {
                    constexpr int cache_tile = kFirstCacheTile + (Turn + I) % kCacheTiles;
                    load_tile<cache_tile>(data + I * kTileLine, value_line);
                    add_unsigned_products<I, cache_tile>();
                    feed.ask();
                });
            });
            store_sums<Count>();
            for (int row = 0; row < rows_in(g); ++row) {
                float* const output = outputs + (g * group_rows + row) * value_dim + block * 16;
                RWORKER_UNROLL
                for (int i = 0; i < Count; ++i) {
                    const __m512i sum = join_bytes<8>(products[i] + row * 16, products[i] + (group_rows + row) * 16);
                    weight_terms[g * group_rows + row].renew(output + i * 16, sum, maxima[g].keep[row]);
                }
            }
        }
    }
};

}  // namespace
