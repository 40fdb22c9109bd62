#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace sworker {

/// Return `bytes` bytes, all zero, that begin at a cache line. They share mappings of huge pages with other weights: each
/// product reads all weights once, and with small pages half of that time goes into the lookup of addresses. A mapping is
/// freed with the last memory in it.
std::shared_ptr<std::int8_t> weight_memory(std::size_t bytes);

}  // namespace sworker
