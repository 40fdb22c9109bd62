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

/// Call `run(task)` once for each task below `count`, on at most `threads` threads, in any order. `run` throws nothing.
template <typename Run>
void parallel_for(std::size_t count, unsigned threads, const Run& run) {
    struct Shared {
        const Run& run;
        std::size_t count;
        std::atomic<std::size_t> next{0};
    } shared{run, count};
    const auto work = [](void* data) {
        Shared& mine = *static_cast<Shared*>(data);
        for (std::size_t task; (task = mine.next.fetch_add(1, std::memory_order_relaxed)) < mine.count;) mine.run(task);
    };
    if (threads > 1 && count > 1 && parallel_region())
        parallel_region()(work, &shared, threads, 0);
    else
        work(&shared);
}

}  // namespace sworker
