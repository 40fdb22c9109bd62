// Which layers are possible, alone and in sequence.
#pragma once

#include <cstdint>
#include <span>

#include "rworker/types.hpp"

namespace rworker {

/// Throws Error for layers that a worker with such a cache cannot have. It names the layer and what would be valid.
void check_layers(std::span<const LayerSpec> layers, DType kv_dtype, std::int64_t block_size);

}  // namespace rworker
