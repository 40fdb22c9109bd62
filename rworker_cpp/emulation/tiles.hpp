// The tile instructions (AMX) in plain C++, for tests on processors without them: Intel's manual, volume 2, word for
// word. What a processor would fault on, and what would compute garbage, aborts with a message.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "vectors.hpp"

namespace tile_emulation {

constexpr int kTiles = 8, kMaxRows = 16, kMaxColumnBytes = 64;

/// What ldtilecfg reads.
struct Config {
    uint8_t palette, start_row, reserved[14];
    uint16_t column_bytes[16];
    uint8_t rows[16];
};
static_assert(sizeof(Config) == 64);

struct Tile {
    int rows, column_bytes;
    alignas(64) uint8_t data[kMaxRows][kMaxColumnBytes];
};

struct State {
    bool configured;
    Tile tiles[kTiles];
};

inline State& state() {
    static thread_local State own{};  // tiles are a thread's own, as registers are
    return own;
}

[[noreturn]] inline void fault(const char* what, int value) {
    fprintf(stderr, "emulated tiles: %s (%d)\n", what, value);
    abort();
}

inline Tile& tile(int index) {
    if (!state().configured) fault("a tile is used where none is configured, or after tilerelease; tile", index);
    if (index < 0 || index >= kTiles) fault("no such tile", index);
    Tile& chosen = state().tiles[index];
    if (chosen.rows == 0 || chosen.column_bytes == 0) fault("a tile without rows or columns is used", index);
    return chosen;
}

inline void clear(Tile& tile) { memset(tile.data, 0, sizeof(tile.data)); }

inline void load_config(const void* data) {
    Config config;
    memcpy(&config, data, sizeof(config));
    if (config.palette != 1) fault("a palette other than 1", config.palette);
    if (config.start_row != 0) fault("start_row is not 0", config.start_row);
    for (const uint8_t byte : config.reserved)
        if (byte != 0) fault("a reserved byte is not 0", byte);
    for (int i = 0; i < 16; ++i) {
        const int rows = config.rows[i], bytes = config.column_bytes[i];
        if (i >= kTiles && (rows != 0 || bytes != 0)) fault("palette 1 has no such tile", i);
        if (rows > kMaxRows) fault("more than 16 rows", rows);
        if (bytes > kMaxColumnBytes || bytes % 4 != 0) fault("a row of more than 64 bytes, or of broken lanes", bytes);
        if ((rows == 0) != (bytes == 0)) fault("rows without columns, or columns without rows, in tile", i);
    }
    for (int i = 0; i < kTiles; ++i) {
        state().tiles[i].rows = config.rows[i], state().tiles[i].column_bytes = config.column_bytes[i];
        clear(state().tiles[i]);
    }
    state().configured = true;
}

inline void release() { state() = State{}; }

inline void load(int index, const void* base, size_t stride) {
    Tile& to = tile(index);
    clear(to);
    for (int r = 0; r < to.rows; ++r)
        memcpy(to.data[r], static_cast<const uint8_t*>(base) + size_t(r) * stride, size_t(to.column_bytes));
}

inline void store(int index, void* base, size_t stride) {
    const Tile& from = tile(index);
    for (int r = 0; r < from.rows; ++r)
        memcpy(static_cast<uint8_t*>(base) + size_t(r) * stride, from.data[r], size_t(from.column_bytes));
}

inline void zero(int index) { clear(tile(index)); }

/// The three tiles of a product, whose shapes must fit.
struct Operands {
    Tile &sum, &a, &b;

    Operands(int to, int left, int right) : sum(tile(to)), a(tile(left)), b(tile(right)) {
        if (to == left || to == right || left == right) fault("a product of tiles that are not three", to);
        if (sum.rows != a.rows || sum.column_bytes != b.column_bytes || a.column_bytes != 4 * b.rows)
            fault("a product of tiles whose shapes do not fit; sums in tile", to);
    }
};

/// Denormals count as zeros, as operands and as results.
RWORKER_INTRINSIC __m512 flush(__m512 x) {
    const auto bits = (emulation::u32x16)x;
    return (__m512)(bits & ((bits & 0x7f800000u) == 0 ? 0x80000000u : ~0u));
}

/// Sums even and odd products separately, rounding each step to nearest; then adds both sums to the old value.
inline void dot_bfloat16(int to, int left, int right) {
    const Operands tiles(to, left, right);
    const int columns = tiles.sum.column_bytes / 4;
    for (int m = 0; m < tiles.sum.rows; ++m) {
        __m512 even{}, odd{}, sums;
        for (int k = 0; k < tiles.a.column_bytes / 4; ++k) {
            uint32_t pair;
            emulation::u32x16 lanes;
            memcpy(&pair, tiles.a.data[m] + 4 * k, sizeof(pair));
            memcpy(&lanes, tiles.b.data[k], sizeof(lanes));
            const emulation::u32x16 pairs = emulation::u32x16{} + pair;
            even = flush(emulation::fused(flush((__m512)(pairs << 16)), flush((__m512)(lanes << 16)), even));
            odd = flush(emulation::fused(flush((__m512)(pairs & 0xffff0000u)), flush((__m512)(lanes & 0xffff0000u)), odd));
        }
        memcpy(&sums, tiles.sum.data[m], sizeof(sums));
        sums = flush(flush(sums) + flush(even + odd));
        memcpy(tiles.sum.data[m], &sums, size_t(columns) * 4);
    }
}

/// 32-bit sums, which wrap, of products of four neighbours; Left and Right say whose bytes have a sign.
template <class Left, class Right>
inline void dot_bytes(int to, int left, int right) {
    const Operands tiles(to, left, right);
    const int columns = tiles.sum.column_bytes / 4;
    for (int m = 0; m < tiles.sum.rows; ++m) {
        uint32_t sums[16];
        memcpy(sums, tiles.sum.data[m], sizeof(sums));
        for (int k = 0; k < tiles.a.column_bytes / 4; ++k)
            for (int n = 0; n < columns; ++n)
                for (int i = 0; i < 4; ++i)
                    sums[n] += uint32_t(int32_t(Left(tiles.a.data[m][4 * k + i])) *
                                        int32_t(Right(tiles.b.data[k][4 * n + i])));
        memcpy(tiles.sum.data[m], sums, size_t(columns) * 4);
    }
}

inline void dot_signed_unsigned(int to, int a, int b) { dot_bytes<int8_t, uint8_t>(to, a, b); }
inline void dot_unsigned_unsigned(int to, int a, int b) { dot_bytes<uint8_t, uint8_t>(to, a, b); }
inline void dot_unsigned_signed(int to, int a, int b) { dot_bytes<uint8_t, int8_t>(to, a, b); }
inline void dot_signed_signed(int to, int a, int b) { dot_bytes<int8_t, int8_t>(to, a, b); }

}  // namespace tile_emulation

#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#undef _tile_dpbsud
#undef _tile_dpbusd
#undef _tile_dpbuud
#define _tile_loadconfig tile_emulation::load_config
#define _tile_release tile_emulation::release
#define _tile_loadd tile_emulation::load
#define _tile_stream_loadd tile_emulation::load
#define _tile_stored tile_emulation::store
#define _tile_zero tile_emulation::zero
#define _tile_dpbf16ps tile_emulation::dot_bfloat16
#define _tile_dpbssd tile_emulation::dot_signed_signed
#define _tile_dpbsud tile_emulation::dot_signed_unsigned
#define _tile_dpbusd tile_emulation::dot_unsigned_signed
#define _tile_dpbuud tile_emulation::dot_unsigned_unsigned
