// Waits in a loop, for the time that it takes to put a thread to sleep.
#pragma once

#include <chrono>

namespace rworker {

inline constexpr std::chrono::microseconds kSpin{20};  // a longer time starves threads on the same cores

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");  // as long as x86's pause, about 40 cycles; a yield does nothing on most cores
#endif
}

}  // namespace rworker
