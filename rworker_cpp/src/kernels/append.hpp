// Writing new tokens straight into the transposed layout.
#pragma once

#include "kernels/stored.hpp"

namespace {

using rworker::AppendArgs;

/// A row of the payload as it will be stored: element i is `bits[i]`, zeros after the last.
template <class L, DType D>
void convert_row(DType dtype, const void* row, int n, float* floats, uint32_t* bits) {
    widen_row<L>(dtype, row, n, 1.0f, floats);
    alignas(64) uint32_t narrowed[16];
    for (int i = 0; i < round_up16(n); i += L::width) {
        narrow<L>(D, L::load(floats + i), narrowed, 0);
        for (int j = 0; j < L::width; ++j) bits[i + j] = Stored<L, D>::bits(narrowed, j);
    }
}

/// Keys: one lane of every line. A bfloat16 line takes two dims at once, the second 0 after an odd last one.
template <class L, DType D>
void store_key(const uint32_t* bits, int key_dim, int lane, uint8_t* tile) {
    if constexpr (D == DType::float32) {
        for (int d = 0; d < key_dim; ++d) reinterpret_cast<uint32_t*>(tile)[d * kTileTokens + lane] = bits[d];
    } else if constexpr (D == DType::float16) {
        for (int d = 0; d < key_dim; ++d) reinterpret_cast<uint16_t*>(tile)[d * kTileTokens + lane] = uint16_t(bits[d]);
    } else {
        for (int d = 0; d < key_dim; d += 2)
            reinterpret_cast<uint32_t*>(tile)[d / 2 * kTileTokens + lane] = bits[d] | bits[d + 1] << 16;
    }
}

/// Values: one line, padding included. The first token of a bfloat16 pair clears its partner, which is stale.
template <class L, DType D>
void store_value(const uint32_t* bits, int padded_dim, int token, uint8_t* tile) {
    if constexpr (D == DType::float32) {
        uint32_t* line = reinterpret_cast<uint32_t*>(tile) + token * padded_dim;
        for (int d = 0; d < padded_dim; ++d) line[d] = bits[d];
    } else if constexpr (D == DType::float16) {
        uint16_t* line = reinterpret_cast<uint16_t*>(tile) + token * padded_dim;
        for (int d = 0; d < padded_dim; ++d) line[d] = uint16_t(bits[d]);
    } else {
        uint32_t* line = reinterpret_cast<uint32_t*>(tile) + token / 2 * padded_dim;
        if (token % 2 == 0)
            for (int d = 0; d < padded_dim; ++d) line[d] = bits[d];
        else
            for (int d = 0; d < padded_dim; ++d) line[d] = (line[d] & 0xffff) | bits[d] << 16;
    }
}

template <class L, DType D>
void append(const AppendArgs& args) {
    alignas(64) float floats[rworker::kMaxHeadDim];
    alignas(64) uint32_t bits[rworker::kMaxHeadDim];
    for (int64_t position = args.begin; position < args.end; ++position) {
        const int64_t row = position - args.begin;
        const int token = int(position % kTileTokens);
        const Tile tile = tile_of(args.view, position / kTileTokens);
        convert_row<L, D>(args.dtype, element(args.dtype, args.keys, row * args.key_stride), args.key_dim, floats,
                          bits);
        store_key<L, D>(bits, args.key_dim, token, tile.keys);
        convert_row<L, D>(args.dtype, element(args.dtype, args.values, row * args.value_stride), args.value_dim, floats,
                          bits);
        store_value<L, D>(bits, round_up16(args.value_dim), token, tile.values);
    }
}

}  // namespace
