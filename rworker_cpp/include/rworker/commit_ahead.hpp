// Commits the memory of blocks before a step takes them.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "rworker/kv_cache.hpp"
#include "rworker/thread_pool.hpp"

namespace rworker {

/// Keeps the memory of the next blocks committed. Otherwise the system commits pages when a step first writes them,
/// while the step waits; in virtual machines that takes 2 ms per MB. Blocks are handed out lowest first, so the next
/// ones are known.
class CommitAhead {
  public:
    enum class Piece { committed, busy, none };

    /// `pool`: no piece begins while it has a job. The thread of `start` runs on `cores`, so that the memory lies on
    /// their NUMA node.
    CommitAhead(const KVCache& cache, const ThreadPool& pool, std::vector<int> cores);
    ~CommitAhead();
    CommitAhead(const CommitAhead&) = delete;
    CommitAhead& operator=(const CommitAhead&) = delete;

    /// Asks for the memory of all blocks below `end`. A lower `end` than before leaves committed memory as it is.
    void aim(std::int64_t end);
    /// Starts a thread that commits what was asked for. The system runs this thread only where a core would be idle.
    /// Without such a thread, the first writes commit memory.
    void start() noexcept;
    /// Commits one layer of the next block, unless the pool has a job or nothing is left. Only one thread may call it.
    Piece commit_piece();
    /// Blocks below this number are committed, in all layers. Any thread may call it.
    std::int64_t end() const { return end_.load(std::memory_order_acquire); }

  private:
    void run();

    const KVCache& cache_;
    const ThreadPool& pool_;
    std::vector<int> cores_;
    std::int64_t layer_ = 0;  // the next layer of block `end_`
    std::atomic<std::int64_t> end_{0}, asked_{0};
    std::atomic<bool> stopping_{false};
    std::thread thread_;
};

}  // namespace rworker
