// Which layers there can be, alone and one after the other.
#pragma once

#include <cstdint>
#include <span>

#include "rworker/types.hpp"

namespace rworker {

/// Throws Error, which names the layer and what would be right, for layers that a worker with such a cache cannot have.
void check_layers(std::span<const LayerSpec> layers, DType kv_dtype, std::int64_t block_size);

}  // namespace rworker
