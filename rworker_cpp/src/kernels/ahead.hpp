// Asking for tiles of codes before they are needed.
#pragma once

#include "kernels/products.hpp"

namespace {

/// Asks for some tiles line by line in one ascending run. Codes are few bytes, so a phase is over before what it asked
/// for has come, unless the hardware's own streams run ahead of it; these follow nothing but a lone ascending run. At
/// the end it stays on the last line.
struct Ahead {
    uint8_t* Tile::* part;  // values or next keys
    const Tile *tile, *last_tile;
    int64_t tile_bytes;
    int step;  // kCacheLineBytes, or 0 where another row has asked already
    const uint8_t *at = tile->*part, *end = at + tile_bytes;
    int owed = 0;  // bytes

    /// As many lines as `Bytes` bytes take, on average.
    template <int Bytes>
    [[gnu::always_inline]] void ask() {
        RWORKER_UNROLL
        for (int i = 0; i < Bytes / kCacheLineBytes; ++i) next_line();
        if constexpr (Bytes % kCacheLineBytes != 0) {
            owed += Bytes % kCacheLineBytes;
            if (owed >= kCacheLineBytes) owed -= kCacheLineBytes, next_line();
        }
    }

    [[gnu::always_inline]] void next_line() {
        prefetch(at);
        at += step;
        if (at >= end) {
            if (tile < last_tile)
                at = (++tile)->*part, end = at + tile_bytes;
            else
                at -= step;
        }
    }
};

/// `tile_bytes` of each tile; 0: nothing.
inline Ahead run_ahead(const Tile* tiles, Range tokens, uint8_t* Tile::* part, int64_t tile_bytes) {
    const int step = tile_bytes != 0 ? kCacheLineBytes : 0;
    return {part, tiles + tokens.begin / kTileTokens, tiles + tokens.end / kTileTokens - 1,
            step ? tile_bytes : kCacheLineBytes, step};
}

}  // namespace
