// The R-worker's threads: a leader that runs jobs in order, and helpers that it wakes for large jobs.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace rworker {

/// Seconds on the steady clock (Python's time.perf_counter).
double now_seconds();

/// One piece of work, cut into items that any thread may run in any order. It can be used again once it is finished.
class Job {
  public:
    virtual ~Job() = default;
    /// Runs item `item` on thread `thread` (0: the leader). The thread runs `next_item` afterwards; -1: not known yet.
    /// It must not throw.
    virtual void run(std::int64_t item, std::int64_t next_item, int thread) noexcept = 0;

    /// A thread that ran items calls it after its last item.
    virtual void leave() noexcept {}

    bool finished() const { return finished_.load(std::memory_order_acquire) != 0; }
    void wait() const;

    double start_seconds = 0, end_seconds = 0;

  protected:
    std::int64_t num_items_ = 0;
    bool worth_helpers_ = false;  // false: the leader runs the job alone, since waking a thread costs about 10 us

  private:
    friend class ThreadPool;
    std::atomic<std::int64_t> next_item_{0};
    std::atomic<std::uint32_t> finished_{1};
    Job* next_ = nullptr;
};

class ThreadPool {
  public:
    /// Pins thread i to cores[i % cores.size()]; without cores, threads are not pinned. Throws std::system_error where
    /// a thread cannot start.
    ThreadPool(int num_threads, std::vector<int> cores);
    ~ThreadPool();  // finishes the submitted jobs
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int num_threads() const { return int(threads_.size()); }
    /// True from the submission of a job to its end. Any thread may call it.
    bool is_busy() const { return num_jobs_.load(std::memory_order_acquire) > 0; }
    /// Queues `job`, which must be finished, and returns at once. Jobs run in order, one at a time.
    void submit(Job& job);
    /// Runs `job` on the calling thread as the leader would, with helpers. All submitted jobs must be finished.
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
    std::atomic<std::int32_t> num_jobs_{0};
    std::atomic<std::uint32_t> num_submitted_{0};  // the leader sleeps on it

    // Helpers sleep on `call_`. When the leader clears kOpen, no more helpers enter, and the leader waits only for
    // those that entered.
    std::atomic<std::uint32_t> call_{0};
    std::atomic<std::uint32_t> door_{0};  // kOpen | number of helpers that run items
    std::atomic<bool> stopping_{false};
    Job* shared_job_ = nullptr;

    std::vector<std::thread> threads_;
};

}  // namespace rworker
