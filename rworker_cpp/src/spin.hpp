// Waiting in a loop, for as long as putting a thread to sleep would take.
#pragma once

#include <chrono>

namespace rworker {

inline constexpr std::chrono::microseconds kSpin{20};  // longer starves what shares the cores

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");  // as long as x86's pause, some 40 cycles; a yield does nothing on most cores
#endif
}

}  // namespace rworker
