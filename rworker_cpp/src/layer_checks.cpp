#include "rworker/layer_checks.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <string>

namespace rworker {
namespace {

void check_layer(const LayerSpec& layer, DType kv_dtype, std::size_t index) {
    const std::string name = "layers[" + std::to_string(index) + "]: ";
    if (layer.state()) return check_state(*layer.state(), name.c_str());
    require(layer.num_kv_heads >= 1 && layer.num_heads >= 1 && layer.num_heads % layer.num_kv_heads == 0,
            name + "num_heads (" + std::to_string(layer.num_heads) + ") must be a positive multiple of num_kv_heads (" +
                std::to_string(layer.num_kv_heads) + ")");
    const int most = is_quantized(kv_dtype) && !layer.values_in_keys() ? kMaxQuantizedHeadDim : kMaxHeadDim;
    for (const std::int64_t dim : {layer.key_dim, layer.value_dim})
        require(dim >= 1 && dim <= most,
                name + "head dims must be 1 to " + std::to_string(most) + ", not " + std::to_string(dim));
    require(!layer.values_in_keys() || layer.value_dim <= layer.key_dim,
            name + "values_in_keys needs keys of at least value_dim elements");
    if (const Latent* const latent = layer.latent())
        require(latent->nope_dim == 0 ? latent->out_dim == 0
                                      : layer.num_kv_heads == 1 && std::min(latent->nope_dim, latent->out_dim) >= 1 &&
                                            std::max(latent->nope_dim, latent->out_dim) <= kMaxHeadDim,
                name + "absorption needs one KV head, and 1 to " + std::to_string(kMaxHeadDim) + " dims");
    require(layer.window >= (layer.chunked ? 1 : 0), name + "window must not be negative, nor 0 where it is a chunk");
    require(layer.soft_cap >= 0.0f, name + "soft_cap must not be negative");
    require(layer.sinks.empty() || std::int64_t(layer.sinks.size()) == layer.num_heads,
            name + "sinks must be empty or one per query head (" + std::to_string(layer.num_heads) + "), not " +
                std::to_string(layer.sinks.size()));
    require(layer.alibi_slopes.empty() || std::int64_t(layer.alibi_slopes.size()) == layer.num_heads,
            name + "alibi_slopes must be empty or one per query head (" + std::to_string(layer.num_heads) + "), not " +
                std::to_string(layer.alibi_slopes.size()));
    for (const float slope : layer.alibi_slopes)
        require(std::isfinite(slope), name + "alibi_slopes must be finite, not " + std::to_string(slope));
}

/// An index layer, and a layer that reads its picks. `layers`: the layers up to this one.
void check_picks(std::span<const LayerSpec> layers, std::int64_t block_size) {
    const LayerSpec& layer = layers.back();
    const std::string name = "layers[" + std::to_string(layers.size() - 1) + "]: ";
    require(layer.picked_by >= -1, name + "picked_by must not be below -1");
    if (const Index* const index = layer.index()) {
        require(index->picks >= 1 && index->picks < INT32_MAX && index->block >= 0 && index->local >= 0,
                name + "picks must be at least 1, and pick_block and pick_local not negative");
        const bool block = std::has_single_bit(std::uint64_t(index->block)) && index->block <= kSplitTokens &&
                           index->block % block_size == 0 && index->local >= 1 && index->local <= index->picks;
        require(index->block == 0 ? index->local == 0 : block,
                name + "pick_block is " + std::to_string(index->block) + "; it must be 0, or a power of two up to " +
                    std::to_string(kSplitTokens) + " and a multiple of block_size (" + std::to_string(block_size) +
                    "), with a pick_local of 1 to picks");
    }
    if (layer.picked_by < 0) return;
    std::int64_t last = std::int64_t(layers.size()) - 2;
    while (last >= 0 && !layers[last].index()) --last;
    require(last >= 0 && layer.picked_by == last, name + "picked_by must be the last layer before it that picks");
    const bool in_blocks = !layers[last].weighs_heads();
    require(layer.window == 0 && layer.alibi_slopes.empty() && layer.values_in_keys() != in_blocks &&
                layer.num_kv_heads == (in_blocks ? layers[last].num_heads : 1),
            name + "a layer that reads what another picks has neither window nor ALiBi; where tokens are picked one KV head "
                   "and values_in_keys, where blocks are picked as many KV heads as that one has heads, and values");
}

}  // namespace

void check_layers(std::span<const LayerSpec> layers, DType kv_dtype, std::int64_t block_size) {
    require(!layers.empty(), "layers is empty; a worker needs at least one");
    for (std::size_t i = 0; i < layers.size(); ++i) check_layer(layers[i], kv_dtype, i);
    for (std::size_t i = 0; i < layers.size(); ++i)
        check_picks({layers.data(), i + 1}, block_size);
}

}  // namespace rworker
