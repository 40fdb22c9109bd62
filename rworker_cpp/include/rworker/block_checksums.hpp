// Checksums of full blocks, by which an R-worker notices that its memory has changed.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "rworker/checksum.hpp"

namespace rworker {

/// One checksum per block and layer. A checksum is valid until the pool hands its block out again. Until `keep` is
/// called there are no checksums, and every method returns at once.
class BlockChecksums {
  public:
    void keep(std::int64_t num_blocks, std::int64_t num_layers);
    bool are_kept() const { return num_layers_ > 0; }
    void set(std::int32_t block, std::int64_t layer, std::uint32_t lives, std::span<const std::uint8_t> bytes);
    /// True where the block has no checksum, or `bytes` still have it.
    bool holds(std::int32_t block, std::int64_t layer, std::uint32_t lives, std::span<const std::uint8_t> bytes) const;
    /// Forgets the checksums of a block that will be written again in part.
    void forget(std::int32_t block);

  private:
    std::int64_t num_layers_ = 0;
    std::vector<std::uint32_t> lives_;  // per block, when its checksums were taken; 0: there are none
    std::vector<Checksum> sums_;        // [block][layer]
};

}  // namespace rworker
