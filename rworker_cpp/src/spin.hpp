// Waiting in a loop, for as long as putting a thread to sleep would take.
#pragma once

#include <chrono>

namespace rworker {

inline constexpr std::chrono::microseconds kSpin{20};  // longer starves what shares the cores

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

}  // namespace rworker
