#pragma once

#include <atomic>
#include <cstddef>

/// Runs tasks on the OpenMP threads that torch brought into the process, so that no second team wants their cores.
namespace sworker {

/// GNU's entry of a parallel region; LLVM's OpenMP has it, too.
using ParallelRegion = void (*)(void (*)(void*), void*, unsigned, unsigned);

/// Null: one thread.
inline ParallelRegion& parallel_region() {
    static ParallelRegion region = nullptr;
    return region;
}

/// The number of the calling thread within its parallel region.
using ThreadNumber = int (*)();

inline ThreadNumber& thread_number() {
    static ThreadNumber number = nullptr;
    return number;
}

/// Call `run(task)` once for each task below `count`, on at most `threads` threads. Each thread runs its own range of
/// tasks in order, then tasks that are left of others' ranges. So in repeated calls, a thread finds memory of its tasks
/// in its cache. `run` throws nothing.
template <typename Run>
void parallel_for(std::size_t count, unsigned threads, const Run& run) {
    constexpr unsigned most = 256;
    struct alignas(64) Range {
        std::atomic<std::size_t> next{0};
        std::size_t end = 0;
    };
    if (threads > most) threads = most;
    if (threads <= 1 || count <= 1 || !parallel_region() || !thread_number()) {
        for (std::size_t task = 0; task < count; ++task) run(task);
        return;
    }
    struct Shared {
        const Run& run;
        unsigned threads;
        Range* ranges;
    };
    Range ranges[most];
    for (unsigned i = 0; i < threads; ++i) {
        ranges[i].next = count * i / threads;
        ranges[i].end = count * (i + 1) / threads;
    }
    Shared shared{run, threads, ranges};
    const auto work = [](void* data) {
        Shared& mine = *static_cast<Shared*>(data);
        const unsigned own = unsigned(thread_number()());
        for (unsigned i = 0; i < mine.threads; ++i) {
            Range& range = mine.ranges[(own + i) % mine.threads];
            for (std::size_t task; (task = range.next.fetch_add(1, std::memory_order_relaxed)) < range.end;)
                mine.run(task);
        }
    };
    parallel_region()(work, &shared, threads, 0);
}

}  // namespace sworker
