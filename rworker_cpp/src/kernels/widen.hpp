// A chunk's tiles as float32 tiles: for many query rows it pays to convert each line once. Products with them add the
// same operands in the same order as products with the stored lines do.
#pragma once

#include "kernels/stored.hpp"

namespace {

constexpr int kWidenRows = 6;  // from so many rows on

/// Elements between two tokens' widened values: lines of one column shall not fall into the same few cache sets.
constexpr int widened_stride(int padded_dim) { return padded_dim + 16; }

/// Floats of a widened tile of keys, of which `pack` lines may be too many.
constexpr int widened_keys(int key_dim) { return kTileTokens * round_up16(key_dim); }

template <class L, DType D>
[[gnu::noinline]] void widen_keys(const uint8_t* keys, int lines, float* floats) {
    using S = Stored<L, D>;
    for (int line = 0; line < lines; ++line)
        for (int part = 0; part < S::pack; ++part)
            for (int t = 0; t < kTileTokens; t += L::width, floats += L::width)
                L::store(floats, S::load(keys + (line * kTileTokens + t) * S::lane_bytes, part));
}

template <class L, DType D>
[[gnu::noinline]] void widen_values(const uint8_t* values, int lines, int padded_dim, float* floats) {
    using S = Stored<L, D>;
    for (int line = 0; line < lines; ++line, floats += S::pack * widened_stride(padded_dim))
        for (int d = 0; d < padded_dim; d += L::width)
            for (int part = 0; part < S::pack; ++part)
                L::store(floats + part * widened_stride(padded_dim) + d,
                         S::load(values + (line * padded_dim + d) * S::lane_bytes, part));
}

/// Asks for a stored tile, `bytes` long, into the second-level cache: the first is busy with widened ones.
inline void prefetch_tile(const uint8_t* data, int bytes) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(data + i, 0, 2);
}

}  // namespace
