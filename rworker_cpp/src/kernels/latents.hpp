// Stores and reads latent rows of quantised caches.
//
// A tile has its rows one after the other, full or not. Before attention, the rows of a split are turned into tiles of
// the model's dtype in a thread's own memory. That costs little beside the products of the many query heads of latent
// attention.
#pragma once

#include "kernels/latent_row.hpp"
#include "kernels/quantize.hpp"

namespace {

using rworker::LatentArgs;

/// int4: two codes to a byte, in place.
inline void pack_latent(uint8_t* codes, int dim) {
    for (int first = 0; first < dim; first += kGroupDims) {
        const LatentGroup group(first, dim);
        for (int i = 0; i < group.half; ++i) {
            const int high = i + group.half < group.dims ? codes[first + group.half + i] : 0;
            codes[first / 2 + i] = uint8_t(codes[first + i] | high << 4);
        }
    }
}

template <class L, DType D>
void append_latents(const AppendArgs& args) {
    const int dim = args.latent_dim, rest = args.key_dim - dim;
    const int64_t row_bytes = args.view.key_tile_bytes / kTileTokens;
    const LatentRow at(D, dim);
    alignas(64) float floats[rworker::kMaxHeadDim];
    alignas(64) uint8_t codes[rworker::kMaxHeadDim];
    uint32_t scales[groups_of(rworker::kMaxHeadDim)];
    alignas(64) uint16_t further[rworker::kMaxHeadDim];
    for_tiles(args, [&](const Tile& tile, int64_t first, int begin, int end) {
        for (int token = begin; token < end; ++token) {
            const void* const key = key_row(args, first + token);
            uint8_t* const row = tile.keys + token * row_bytes;
            widen_row<L>(args.dtype, key, dim, 1.0f, floats);
            if constexpr (is_rotated(D)) rotate(floats, dim);
            quantize_row<L, D>(floats, dim, kTopValueCode, codes, scales);
            if constexpr (D == DType::int4) pack_latent(codes, dim);
            __builtin_memcpy(row, codes, size_t(at.scales));
            __builtin_memcpy(row + at.scales, scales, size_t(at.rest - at.scales));
            widen_row<L>(args.dtype, element(args.dtype, key, dim), rest, 1.0f, floats);
            narrow_row<L>(DType::bfloat16, floats, rest, further);
            __builtin_memcpy(row + at.rest, further, size_t(rest) * 2);
        }
    });
}

template <class L, DType D>
void read_latents(const LatentArgs& args) {
    const int64_t row_bytes = args.rows.key_tile_bytes / kTileTokens;
    alignas(64) float floats[kTileTokens * rworker::kMaxHeadDim];
    for (int64_t first = args.begin; first < args.end; first += kTileTokens) {
        const int64_t end = first + kTileTokens < args.end ? first + kTileTokens : args.end;
        const uint8_t* const rows = tile_of(args.rows, first / kTileTokens).keys;
        for (int64_t token = 0; token < end - first; ++token)
            read_latent<D>(rows + token * row_bytes, args.latent_dim, args.key_dim - args.latent_dim,
                           floats + token * args.key_dim);
        with_dtype(args.dtype, [&]<DType To>() {
            append<L, To>({.view = args.tiles,
                           .dtype = DType::float32,
                           .keys = floats,
                           .values = floats,
                           .key_stride = args.key_dim,
                           .value_stride = args.key_dim,
                           .begin = first,
                           .end = end,
                           .key_dim = args.key_dim,
                           .value_dim = args.latent_dim});
        });
    }
}

}  // namespace
