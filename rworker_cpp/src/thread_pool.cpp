#include "rworker/thread_pool.hpp"

#include <pthread.h>

#include <chrono>
#include <string>
#include <utility>

#include "spin.hpp"

namespace rworker {
namespace {

constexpr std::uint32_t kOpen = 1u << 31;
constexpr std::int64_t kLastItems = 4;  // per thread

/// Returns once `value` differs from `old`: spins for a short time, then sleeps on a futex.
void wait_while(const std::atomic<std::uint32_t>& value, std::uint32_t old) {
    const auto deadline = std::chrono::steady_clock::now() + kSpin;
    do {
        for (int i = 0; i < 16; ++i) {
            if (value.load(std::memory_order_acquire) != old) return;
            relax();
        }
    } while (std::chrono::steady_clock::now() < deadline);
    value.wait(old, std::memory_order_acquire);
}

#ifdef RWORKER_PORTABLE
void name_and_pin(std::thread&, int, const std::vector<int>&) {}
#else
void name_and_pin(std::thread& thread, int index, const std::vector<int>& cores) {
    const std::string name = "rworker-" + std::to_string(index);
    pthread_setname_np(thread.native_handle(), name.c_str());
    if (cores.empty()) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cores[index % cores.size()], &set);
    pthread_setaffinity_np(thread.native_handle(), sizeof(set), &set);
}
#endif

}  // namespace

double now_seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void Job::wait() const {
    while (!finished()) wait_while(finished_, 0);
}

// A delegating constructor completes the pool before its first thread. If a later thread does not start, the earlier
// ones are joined.
ThreadPool::ThreadPool(int num_threads, std::vector<int> cores) : ThreadPool() {
    threads_.reserve(num_threads);
    threads_.emplace_back([this] { lead(); });
    for (int i = 1; i < num_threads; ++i) threads_.emplace_back([this, i] { help(i); });
    for (int i = 0; i < num_threads; ++i) name_and_pin(threads_[i], i, cores);
}

ThreadPool::~ThreadPool() {
    {
        std::lock_guard lock(queue_mutex_);
        closing_ = true;
    }
    num_submitted_.fetch_add(1, std::memory_order_release);
    num_submitted_.notify_all();
    if (!threads_.empty()) threads_[0].join();
    stopping_.store(true, std::memory_order_release);
    call_.fetch_add(1, std::memory_order_release);
    call_.notify_all();
    for (std::size_t i = 1; i < threads_.size(); ++i) threads_[i].join();
}

void ThreadPool::submit(Job& job) {
    job.next_ = nullptr;
    job.next_item_.store(0, std::memory_order_relaxed);
    job.finished_.store(0, std::memory_order_relaxed);
    num_jobs_.fetch_add(1, std::memory_order_release);
    {
        std::lock_guard lock(queue_mutex_);
        (last_ ? last_->next_ : first_) = &job;
        last_ = &job;
    }
    num_submitted_.fetch_add(1, std::memory_order_release);
    num_submitted_.notify_one();
}

void ThreadPool::run_here(Job& job) {
    job.next_item_.store(0, std::memory_order_relaxed);
    num_jobs_.fetch_add(1, std::memory_order_release);
    lead(job);
}

void ThreadPool::lead(Job& job) {
    job.start_seconds = now_seconds();
    job.worth_helpers_&& num_threads() > 1 ? run_with_helpers(job) : run_items(job, 0);
    job.end_seconds = now_seconds();
    num_jobs_.fetch_sub(1, std::memory_order_release);
}

Job* ThreadPool::take() {
    std::lock_guard lock(queue_mutex_);
    Job* job = first_;
    if (job) first_ = job->next_;
    if (!first_) last_ = nullptr;
    return job;
}

void ThreadPool::lead() {
    for (;;) {
        const std::uint32_t seen = num_submitted_.load(std::memory_order_acquire);
        if (Job* job = take()) {
            lead(*job);
            job->finished_.store(1);  // sequentially consistent: notify_all looks for sleepers after it
            job->finished_.notify_all();
            continue;
        }
        {
            std::lock_guard lock(queue_mutex_);
            if (closing_ && !first_) return;
        }
        wait_while(num_submitted_, seen);
    }
}

void ThreadPool::run_with_helpers(Job& job) {
    shared_job_ = &job;
    door_.store(kOpen, std::memory_order_release);
    call_.fetch_add(1, std::memory_order_release);
    call_.notify_all();
    run_items(job, 0);
    for (std::uint32_t inside = door_.fetch_and(~kOpen, std::memory_order_acq_rel) & ~kOpen; inside != 0;
         inside = door_.load(std::memory_order_acquire))
        wait_while(door_, inside);
}

void ThreadPool::help(int thread) {
    std::uint32_t seen = 0;
    for (;;) {
        wait_while(call_, seen);
        seen = call_.load(std::memory_order_acquire);
        if (stopping_.load(std::memory_order_acquire)) return;
        std::uint32_t door = door_.load(std::memory_order_acquire);
        while ((door & kOpen) && !door_.compare_exchange_weak(door, door + 1, std::memory_order_acq_rel)) {
        }
        if (!(door & kOpen)) continue;
        run_items(*shared_job_, thread);
        if (door_.fetch_sub(1, std::memory_order_acq_rel) == 1) door_.notify_all();
    }
}

/// Claims one item ahead, so that its data can be prefetched. It does not near the end, where another thread may be
/// free sooner.
void ThreadPool::run_items(Job& job, int thread) const {
    const auto claim = [&] { return job.next_item_.fetch_add(1, std::memory_order_relaxed); };
    const std::int64_t claim_ahead_end = job.num_items_ - (num_threads() > 1 ? kLastItems * num_threads() : 0);
    std::int64_t item = claim();
    if (item >= job.num_items_) return;
    while (item < job.num_items_) {
        const std::int64_t next = item + 1 < claim_ahead_end ? claim() : -1;
        job.run(item, next < job.num_items_ ? next : -1, thread);
        item = next < 0 ? claim() : next;
    }
    job.leave();
}

}  // namespace rworker
