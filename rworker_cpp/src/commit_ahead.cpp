#include "rworker/commit_ahead.hpp"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <system_error>
#include <utility>

namespace rworker {
namespace {

#ifdef RWORKER_PORTABLE
void run_where_idle(const std::vector<int>&) {}
#else
/// Priority of the calling thread: any other thread takes a core from it at once.
void run_where_idle(const std::vector<int>& cores) {
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
    stopping_.store(true);
    asked_.store(-1);  // wakes the thread
    asked_.notify_all();
    if (thread_.joinable()) thread_.join();
}

void CommitAhead::aim(std::int64_t end) {
    if (asked_.exchange(end) != end) asked_.notify_all();
}

void CommitAhead::start() noexcept {
    if (thread_.joinable() || !Arena::can_commit()) return;
    try {
        thread_ = std::thread([this] { run(); });
    } catch (const std::system_error&) {
    }
}

CommitAhead::Piece CommitAhead::commit_piece() {
    const std::int64_t touched = cache_.pool().num_touched();
    if (touched > end()) {  // a step has written these blocks or is about to
        end_.store(touched, std::memory_order_release);
        layer_ = 0;
    }
    const std::int64_t block = end();
    if (block >= asked_.load()) return Piece::none;
    if (pool_.is_busy()) return Piece::busy;
    cache_.commit_block(layer_, block);
    if (++layer_ == std::int64_t(cache_.layers().size())) {
        layer_ = 0;
        end_.store(block + 1, std::memory_order_release);
    }
    return Piece::committed;
}

void CommitAhead::run() {
    constexpr std::chrono::microseconds kRest{100};  // until the pool is asked again whether it is busy
    run_where_idle(cores_);
    while (!stopping_.load()) {
        const std::int64_t asked = asked_.load();
        const Piece piece = commit_piece();
        if (piece == Piece::busy) std::this_thread::sleep_for(kRest);
        if (piece == Piece::none) asked_.wait(asked);
    }
}

}  // namespace rworker
