#include "rworker/block_pool.hpp"

#include <algorithm>
#include <string>

#include "rworker/types.hpp"

namespace rworker {

BlockPool::BlockPool(std::int64_t num_blocks) : references_(num_blocks, 0), lives_(num_blocks, 0), free_(num_blocks) {
    for (std::int64_t i = 0; i < num_blocks; ++i) free_[i] = std::int32_t(num_blocks - 1 - i);
}

std::int32_t BlockPool::take() {
    if (free_.empty())
        throw Error("out of blocks: a bug in the scheduler: it asked for more than the " +
                    std::to_string(num_blocks()) + " blocks there are");
    const std::int32_t block = free_.back();
    free_.pop_back();
    references_[block] = 1;
    ++lives_[block];
    if (block >= num_touched()) num_touched_.store(block + 1, std::memory_order_relaxed);
    log_.push_back({Change::taken, block});
    return block;
}

std::int64_t BlockPool::num_shared() const {
    return std::count_if(references_.begin(), references_.end(), [](std::int32_t count) { return count > 1; });
}

void BlockPool::add_reference(std::int32_t block) {
    ++references_[block];
    log_.push_back({Change::referenced, block});
}

void BlockPool::drop_reference(std::int32_t block) {
    if (--references_[block] == 0) free_.push_back(block);
    log_.push_back({Change::dropped, block});
}

void BlockPool::undo_to(std::size_t log_size) {
    for (; log_.size() > log_size; log_.pop_back()) {
        const auto [change, block] = log_.back();
        if (change == Change::taken) {
            references_[block] = 0;
            free_.push_back(block);
        } else if (change == Change::referenced) {
            --references_[block];
        } else if (references_[block]++ == 0) {
            free_.pop_back();
        }
    }
}

}  // namespace rworker
