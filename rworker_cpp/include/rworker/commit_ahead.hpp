// Commits the memory of blocks before a step takes them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "rworker/kv_cache.hpp"
#include "rworker/thread_pool.hpp"

namespace rworker {

/// Commits the memory of the next blocks, piece by piece, while the worker is idle. A piece is one layer of one block.
/// Without it, a step's first write would commit pages and wait: 2 ms per MB in virtual machines. The pool hands out
/// the lowest block first, so the next blocks are known.
class CommitAhead {
  public:
    enum class Piece { committed, busy, none, failed };

    /// No piece begins while `pool` has a job. The thread of `start` runs on `cores`, so that the memory belongs to
    /// their NUMA node.
    CommitAhead(const KVCache& cache, const ThreadPool& pool, std::vector<int> cores);
    ~CommitAhead();
    CommitAhead(const CommitAhead&) = delete;
    CommitAhead& operator=(const CommitAhead&) = delete;

    /// Asks for the memory of all blocks below `end`. A lower `end` than before leaves committed memory as it is.
    void aim(std::int64_t end);
    /// No piece begins while a step is open, nor within kQuietSeconds after a step begins or ends. The next step comes
    /// soon, and if S-worker and R-worker share cores, a piece would delay the S-worker's products.
    void begin_step(double now);
    void end_step(double now);
    /// Starts a thread that commits what was asked for. The thread has the lowest priority. Where no thread can be
    /// started, steps commit memory.
    void start() noexcept;
    /// Commits one layer of the next block, unless the worker is not idle or nothing is left. One thread may call it.
    Piece commit_piece(double now);
    /// Blocks below this number are committed, in all layers. Any thread may call it.
    std::int64_t end() const { return end_.load(std::memory_order_acquire); }

    static constexpr double kQuietSeconds = 0.02;

  private:
    void run();

    const KVCache& cache_;
    const ThreadPool& pool_;
    std::vector<int> cores_;
    std::int64_t layer_ = 0;  // the next layer of block `end_`
    std::atomic<std::int64_t> end_{0};
    std::atomic<double> quiet_until_{0.0};
    std::atomic<bool> in_step_{false};
    std::mutex mutex_;  // guards the next two lines
    std::int64_t asked_ = 0;
    bool stopping_ = false;
    std::condition_variable changed_;
    std::thread thread_;
};

}  // namespace rworker
