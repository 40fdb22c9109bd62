// The tile registers (AMX): their shapes, loads and products.
//
// tmm0 to tmm3 hold sums, tmm4 holds the rows' side of a product (queries, weights), tmm5 to tmm7 alternate for the
// cache's side.
#pragma once

#include <immintrin.h>
#include <stdint.h>

namespace {

constexpr int kSumTiles = 4, kRowTile = 4, kFirstCacheTile = 5, kCacheTiles = 3;
constexpr int kTileRows = 16;     // most rows of a tile
constexpr int kTileLine = 64;     // bytes of a tile's row
constexpr int kTileBytes = 1024;  // bytes of a tile with 16 rows

/// Compilers may assume that loading a tile reads no memory (g++ 12 has no clobber there). This makes them finish
/// earlier stores first.
[[gnu::always_inline]] inline void finish_stores() { __asm__ volatile("" ::: "memory"); }

/// Rows of this thread's configuration, 0: none. It is kept because setting it costs about 200 cycles.
thread_local int configured_rows = 0;

/// Sums and the rows' side get `rows` rows, the cache's side 16.
[[gnu::noinline]] void configure_tiles(int rows) {
    if (configured_rows == rows) return;
    struct {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t column_bytes[16] = {};
        uint8_t rows[16] = {};
    } config;
    for (int tile = 0; tile < kFirstCacheTile + kCacheTiles; ++tile) {
        config.column_bytes[tile] = kTileLine;
        config.rows[tile] = uint8_t(tile < kFirstCacheTile ? rows : kTileRows);
    }
    finish_stores();
    _tile_loadconfig(&config);
    configured_rows = rows;
}

/// Frees the tiles, since live tiles slow every context switch.
void release_tiles() {
    if (configured_rows == 0) return;
    _tile_release();
    configured_rows = 0;
}

// The intrinsics accept only literal numbers.

template <int Tile>
[[gnu::always_inline]] inline void load_tile(const void* data, int64_t stride) {
    if constexpr (Tile == 0) _tile_loadd(0, data, stride);
    if constexpr (Tile == 1) _tile_loadd(1, data, stride);
    if constexpr (Tile == 2) _tile_loadd(2, data, stride);
    if constexpr (Tile == 3) _tile_loadd(3, data, stride);
    if constexpr (Tile == 4) _tile_loadd(4, data, stride);
    if constexpr (Tile == 5) _tile_loadd(5, data, stride);
    if constexpr (Tile == 6) _tile_loadd(6, data, stride);
    if constexpr (Tile == 7) _tile_loadd(7, data, stride);
}

template <int Sum>
[[gnu::always_inline]] inline void store_sum(void* data, int64_t stride) {
    if constexpr (Sum == 0) _tile_stored(0, data, stride);
    if constexpr (Sum == 1) _tile_stored(1, data, stride);
    if constexpr (Sum == 2) _tile_stored(2, data, stride);
    if constexpr (Sum == 3) _tile_stored(3, data, stride);
}

template <int Sum>
[[gnu::always_inline]] inline void clear_sum() {
    if constexpr (Sum == 0) _tile_zero(0);
    if constexpr (Sum == 1) _tile_zero(1);
    if constexpr (Sum == 2) _tile_zero(2);
    if constexpr (Sum == 3) _tile_zero(3);
}

/// A product for each of the four sums and three tiles of the cache's side: sum += rows x cache.
#define RWORKER_TILE_PRODUCT(name, product)                          \
    template <int Sum, int Cache>                                    \
    [[gnu::always_inline]] inline void name() {                      \
        if constexpr (Sum == 0 && Cache == 5) product(0, 4, 5);      \
        if constexpr (Sum == 0 && Cache == 6) product(0, 4, 6);      \
        if constexpr (Sum == 0 && Cache == 7) product(0, 4, 7);      \
        if constexpr (Sum == 1 && Cache == 5) product(1, 4, 5);      \
        if constexpr (Sum == 1 && Cache == 6) product(1, 4, 6);      \
        if constexpr (Sum == 1 && Cache == 7) product(1, 4, 7);      \
        if constexpr (Sum == 2 && Cache == 5) product(2, 4, 5);      \
        if constexpr (Sum == 2 && Cache == 6) product(2, 4, 6);      \
        if constexpr (Sum == 2 && Cache == 7) product(2, 4, 7);      \
        if constexpr (Sum == 3 && Cache == 5) product(3, 4, 5);      \
        if constexpr (Sum == 3 && Cache == 6) product(3, 4, 6);      \
        if constexpr (Sum == 3 && Cache == 7) product(3, 4, 7);      \
    }

RWORKER_TILE_PRODUCT(add_bfloat_products, _tile_dpbf16ps)
RWORKER_TILE_PRODUCT(add_signed_products, _tile_dpbsud)
RWORKER_TILE_PRODUCT(add_unsigned_products, _tile_dpbuud)
#undef RWORKER_TILE_PRODUCT

/// Calls f.operator()<0>() and so on, `Count` times.
template <int Count, class F>
[[gnu::always_inline]] inline void for_each_sum(F f) {
    if constexpr (Count > 0) f.template operator()<0>();
    if constexpr (Count > 1) f.template operator()<1>();
    if constexpr (Count > 2) f.template operator()<2>();
    if constexpr (Count > 3) f.template operator()<3>();
}

/// Calls f.operator()<turn>(round) for the rounds [begin, end). Each round has up to four products and continues the
/// rotation of the cache's tiles where the last one ended.
template <class F>
[[gnu::always_inline]] inline void for_each_round(int begin, int end, F f) {
    for (int round = begin; round < end; round += 3) {
        f.template operator()<0>(round);
        if (round + 1 < end) f.template operator()<1>(round + 1);
        if (round + 2 < end) f.template operator()<2>(round + 2);
    }
}

/// Calls f.operator()<count>() for a count of 1 to 4, or with 4 for more.
template <class F>
[[gnu::always_inline]] inline void with_count(int count, F f) {
    if (count >= 4) return f.template operator()<4>();
    if (count == 3) return f.template operator()<3>();
    if (count == 2) return f.template operator()<2>();
    f.template operator()<1>();
}

}  // namespace
