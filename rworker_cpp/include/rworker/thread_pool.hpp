// The R-worker's own threads: a leader that takes jobs in order, and helpers it wakes when a job is worth it.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace rworker {

/// Seconds on the steady clock (Python's time.perf_counter).
double now_seconds();

/// One piece of work, cut into items that any thread may take in any order. Reusable once finished.
class Job {
  public:
    virtual ~Job() = default;
    /// Runs item `item` on thread `thread` (0: the leader), which will run `next_item` after it, or -1: not known yet.
    /// Must not throw.
    virtual void run(std::int64_t item, std::int64_t next_item, int thread) noexcept = 0;

    /// Called by a thread that ran items, after its last.
    virtual void leave() noexcept {}

    bool finished() const { return finished_.load(std::memory_order_acquire) != 0; }
    void wait() const;

    double start_seconds = 0, end_seconds = 0;

  protected:
    std::int64_t num_items_ = 0;
    bool worth_helpers_ = false;  // else the leader does it alone: waking a thread costs some 10 us

  private:
    friend class ThreadPool;
    std::atomic<std::int64_t> next_item_{0};
    std::atomic<std::uint32_t> finished_{1};
    Job* next_ = nullptr;
};

class ThreadPool {
  public:
    /// Thread i is pinned to cores[i % cores.size()]; no cores: not pinned. Throws std::system_error where one cannot start.
    ThreadPool(int num_threads, std::vector<int> cores);
    ~ThreadPool();  // finishes what was submitted
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int num_threads() const { return int(threads_.size()); }
    /// Queues `job`, which must be finished, and returns at once. Jobs run one after another.
    void submit(Job& job);
    /// Runs `job` as the leader would, helpers and all, on the calling thread. Nothing that was submitted may be unfinished.
    void run_here(Job& job);

  private:
    ThreadPool() = default;  // no thread yet
    void lead();
    void lead(Job& job);
    void help(int thread);
    Job* take();
    void run_with_helpers(Job& job);
    void run_items(Job& job, int thread) const;

    std::mutex queue_mutex_;
    Job *first_ = nullptr, *last_ = nullptr;
    bool closing_ = false;
    std::atomic<std::uint32_t> num_submitted_{0};  // the leader sleeps on it

    // Helpers sleep on `call_`. A thread that comes late finds the door closed: the leader waits only for those inside.
    std::atomic<std::uint32_t> call_{0};
    std::atomic<std::uint32_t> door_{0};  // kOpen | helpers inside
    std::atomic<bool> stopping_{false};
    Job* shared_job_ = nullptr;

    std::vector<std::thread> threads_;
};

}  // namespace rworker
