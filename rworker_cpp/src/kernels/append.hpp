// Writes new tokens into the cache.
#pragma once

#include "kernels/stored.hpp"
#include "kernels/transpose.hpp"

namespace {

using rworker::AppendArgs;

/// Converts a row of the payload to the cache's dtype, up to a multiple of 16 elements, with zeros after the last.
template <class L, DType D>
void convert_row(DType dtype, const void* row, int n, void* converted) {
    if (dtype == D) {
        copy_elements(D, row, converted, n);
    } else {
        alignas(64) float floats[rworker::kMaxHeadDim];
        widen_row<L>(dtype, row, n, 1.0f, floats);
        narrow_row<L>(D, floats, n, converted);
    }
    __builtin_memset(const_cast<void*>(element(D, converted, n)), 0, size_t(round_up16(n) - n) * item_bytes(D));
}

/// Writes values: one line, with padding. The first token of a bfloat16 pair clears the stale second one.
template <DType D>
void store_value(const void* row, int padded_dim, int token, uint8_t* tile) {
    if constexpr (D == DType::bfloat16) {
        const uint16_t* bits = static_cast<const uint16_t*>(row);
        uint32_t* line = reinterpret_cast<uint32_t*>(tile) + token / 2 * padded_dim;
        if (token % 2 == 0)
            for (int d = 0; d < padded_dim; ++d) line[d] = bits[d];
        else
            for (int d = 0; d < padded_dim; ++d) line[d] = (line[d] & 0xffff) | uint32_t(bits[d]) << 16;
    } else {
        copy_elements(D, row, const_cast<void*>(element(D, tile, int64_t(token) * padded_dim)), padded_dim);
    }
}

/// Writes keys of the tokens [begin, end) of one tile of `lines` words; `write_row(token, row)` gives one row. They are
/// rows until the tile is full; then the whole tile becomes lanes, unless it keeps its rows.
template <class Word, class WriteRow>
[[gnu::always_inline]] inline void store_keys(int begin, int end, int lines, Word* tile, WriteRow write_row,
                                              bool keep_rows = false) {
    if (end < kTileTokens || keep_rows) {
        for (int token = begin; token < end; ++token) write_row(token, tile + token * lines);
        return;
    }
    alignas(64) Word rows[kTileTokens * rworker::kMaxHeadDim];
    __builtin_memcpy(rows, tile, size_t(begin) * lines * sizeof(Word));
    for (int token = begin; token < end; ++token) write_row(token, rows + token * lines);
    rows_to_lanes(rows, kTileTokens, lines, tile);
}

/// Calls f(tile, first token, one past the last) with the tokens of each tile; tokens count from the tile's first.
template <class F>
[[gnu::always_inline]] inline void for_tiles(const AppendArgs& args, F f) {
    for (int64_t position = args.begin; position < args.end;) {
        const int64_t first = position / kTileTokens * kTileTokens;
        const int64_t end = first + kTileTokens < args.end ? first + kTileTokens : args.end;
        f(tile_of(args.view, first / kTileTokens), first, int(position - first), int(end - first));
        position = end;
    }
}

inline const void* key_row(const AppendArgs& args, int64_t position) {
    return element(args.dtype, args.keys, (position - args.begin) * args.key_stride);
}

inline const void* value_row(const AppendArgs& args, int64_t position) {
    return element(args.dtype, args.values, (position - args.begin) * args.value_stride);
}

template <class L, DType D>
void append(const AppendArgs& args) {
    using Word = StoredWord<Stored<L, D>::lane_bytes>;
    constexpr int pack = Stored<L, D>::pack;
    const int lines = (args.key_dim + pack - 1) / pack;
    alignas(64) uint8_t row[rworker::kMaxHeadDim * 4];
    for_tiles(args, [&](const Tile& tile, int64_t first, int begin, int end) {
        const auto write_row = [&](int token, Word* words) {
            convert_row<L, D>(args.dtype, key_row(args, first + token), args.key_dim, row);
            __builtin_memcpy(words, row, size_t(lines) * sizeof(Word));
        };
        store_keys(begin, end, lines, reinterpret_cast<Word*>(tile.keys), write_row, args.keep_rows);
        for (int token = begin; args.value_dim > 0 && token < end; ++token) {
            convert_row<L, D>(args.dtype, value_row(args, first + token), args.value_dim, row);
            store_value<D>(row, round_up16(args.value_dim), token, tile.values);
        }
    });
}

}  // namespace
