#include "rworker/commit_ahead.hpp"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <system_error>
#include <utility>

namespace rworker {
namespace {

#ifdef RWORKER_PORTABLE
void yield_to_all(const std::vector<int>&) {}
#else
/// Gives the calling thread the lowest priority.
void yield_to_all(const std::vector<int>& cores) {
    pthread_setname_np(pthread_self(), "rworker-ahead");
    const sched_param none{};
    pthread_setschedparam(pthread_self(), SCHED_IDLE, &none);
    if (cores.empty()) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    for (const int core : cores) CPU_SET(core, &set);
    pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
}
#endif

}  // namespace

CommitAhead::CommitAhead(const KVCache& cache, const ThreadPool& pool, std::vector<int> cores)
    : cache_(cache), pool_(pool), cores_(std::move(cores)) {}

CommitAhead::~CommitAhead() {
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
}

void CommitAhead::aim(std::int64_t end) {
    {
        const std::lock_guard lock(mutex_);
        if (std::exchange(asked_, end) == end) return;
    }
    changed_.notify_all();
}

void CommitAhead::begin_step(double now) {
    in_step_.store(true, std::memory_order_release);
    quiet_until_.store(now + kQuietSeconds, std::memory_order_release);
}

void CommitAhead::end_step(double now) {
    quiet_until_.store(now + kQuietSeconds, std::memory_order_release);
    in_step_.store(false, std::memory_order_release);
}

void CommitAhead::start() noexcept {
    if (thread_.joinable() || !Arena::can_commit()) return;
    try {
        thread_ = std::thread([this] { run(); });
    } catch (const std::system_error&) {
    }
}

CommitAhead::Piece CommitAhead::commit_piece(double now) {
    if (cache_.pool().num_touched() > end()) {  // a step has written these blocks or is about to
        end_.store(cache_.pool().num_touched(), std::memory_order_release);
        layer_ = 0;
    }
    const std::int64_t block = end();
    {
        const std::lock_guard lock(mutex_);
        if (block >= asked_) return Piece::none;
    }
    if (in_step_.load(std::memory_order_acquire) || now < quiet_until_.load(std::memory_order_acquire) || pool_.is_busy())
        return Piece::busy;
    if (!cache_.commit_block(layer_, block)) return Piece::failed;
    if (++layer_ == std::int64_t(cache_.layers().size())) {
        layer_ = 0;
        end_.store(block + 1, std::memory_order_release);
    }
    return Piece::committed;
}

void CommitAhead::run() {
    yield_to_all(cores_);
    for (;;) {
        const Piece piece = commit_piece(now_seconds());
        std::unique_lock lock(mutex_);
        if (piece == Piece::busy)
            changed_.wait_for(lock, std::chrono::duration<double>(kQuietSeconds), [&] { return stopping_; });
        if (piece == Piece::none) changed_.wait(lock, [&] { return stopping_ || asked_ > end(); });
        if (stopping_ || piece == Piece::failed) return;
    }
}

}  // namespace rworker
