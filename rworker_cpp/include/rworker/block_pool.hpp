// Reference-counted block ids with an undo log.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace rworker {

/// Hands out block ids 0..num_blocks-1, the lowest first, and the last returned first, so that resident memory stays
/// small. Changes since `forget_log()` can be undone exactly, with the order of the free list.
class BlockPool {
  public:
    explicit BlockPool(std::int64_t num_blocks);

    std::int64_t num_blocks() const { return std::int64_t(references_.size()); }
    std::int64_t num_free() const { return std::int64_t(free_.size()); }
    /// How often a block was taken. If this number has changed, the block holds another sequence's data.
    std::uint32_t lives(std::int32_t block) const { return lives_[block]; }
    bool shared(std::int32_t block) const { return references_[block] > 1; }
    std::int64_t num_shared() const;
    /// Blocks below this number were handed out at some time, so they may be resident. Any thread may call it.
    std::int64_t num_touched() const { return num_touched_.load(std::memory_order_relaxed); }

    /// Takes a block with one reference. Throws Error when none is free.
    std::int32_t take();
    void add_reference(std::int32_t block);
    void drop_reference(std::int32_t block);

    void forget_log() { log_.clear(); }
    std::size_t log_size() const { return log_.size(); }
    /// Undoes changes, latest first, until the log is as long as `log_size()` once was.
    void undo_to(std::size_t log_size);

  private:
    enum class Change : std::uint8_t { taken, referenced, dropped };
    struct Entry {
        Change change;
        std::int32_t block;
    };

    std::vector<std::int32_t> references_;
    std::vector<std::uint32_t> lives_;
    std::vector<std::int32_t> free_;  // a stack
    std::vector<Entry> log_;
    std::atomic<std::int64_t> num_touched_ = 0;
};

}  // namespace rworker
