// Finds splits whose blocks several sequences of a mini-batch hold, by their last block.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

namespace rworker {

/// A split and the spans that read it, in their order.
struct SharedSplit {
    std::int64_t split;
    std::vector<std::int32_t> spans;
};

/// Sequences share a block only after a fork, which shares all earlier blocks too. So sequences that hold the last
/// block of a split hold the same keys and values in the whole split.
class SharedSplits {
  public:
    void add(std::int64_t split, std::int32_t last_block, std::int32_t span) {
        const auto [found, is_new] = index_of_block_.try_emplace(last_block, splits_.size());
        if (is_new) splits_.push_back({split, {}});
        splits_[found->second].spans.push_back(span);
    }
    const std::vector<SharedSplit>& all() const { return splits_; }

  private:
    std::unordered_map<std::int32_t, std::size_t> index_of_block_;
    std::vector<SharedSplit> splits_;
};

}  // namespace rworker
