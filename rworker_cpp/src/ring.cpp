#include "rworker/ring.hpp"

#ifndef RWORKER_PORTABLE
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#endif

#include <chrono>
#include <string>
#include <thread>

#include "rworker/types.hpp"
#include "spin.hpp"

namespace rworker {
namespace {

using SteadyClock = std::chrono::steady_clock;

static_assert(std::atomic<std::uint32_t>::is_always_lock_free, "processes share these");

#ifdef RWORKER_PORTABLE
/// How long the reader sleeps before it looks for a word again, since the processes share no futex here.
constexpr std::chrono::microseconds kNap{50};

void wake(std::atomic<std::uint32_t>&) {}

void sleep_on(const std::atomic<std::uint32_t>& word, std::uint32_t value, double seconds) {
    const auto end = SteadyClock::now() + std::chrono::duration<double>(seconds);
    while (word.load() == value && SteadyClock::now() < end) std::this_thread::sleep_for(kNap);
}
#else
/// The plain futex, since std::atomic's wait works within one process only.
long futex(std::atomic<std::uint32_t>& word, int operation, std::uint32_t value, const timespec* timeout) {
    return syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), operation, value, timeout, nullptr, 0);
}

void wake(std::atomic<std::uint32_t>& word) { futex(word, FUTEX_WAKE, 1, nullptr); }

/// Returns when `word` differs from `value`, when the time is over, or sometimes without a reason.
void sleep_on(std::atomic<std::uint32_t>& word, std::uint32_t value, double seconds) {
    const auto whole = static_cast<time_t>(seconds);
    const timespec timeout{whole, static_cast<long>((seconds - double(whole)) * 1e9)};
    futex(word, FUTEX_WAIT, value, &timeout);
}
#endif

}  // namespace

void Ring::push(std::uint64_t word) {
    const std::uint32_t pushed = state_->pushed.load(std::memory_order_relaxed);
    if (pushed - state_->popped.load(std::memory_order_acquire) >= RingState::kCapacity)
        throw Error("the ring is full: the other process has not read " + std::to_string(RingState::kCapacity) +
                    " words");
    state_->words[pushed % RingState::kCapacity] = word;
    // Sequentially consistent with the reader's access: either it sees the word before it sleeps, or we see that it
    // sleeps.
    state_->pushed.store(pushed + 1);
    if (state_->sleeping.load() != 0) wake(state_->pushed);
}

std::optional<std::uint64_t> Ring::pop(double timeout_seconds) {
    if (empty() && timeout_seconds > 0) {
        const SteadyClock::time_point start = SteadyClock::now();
        while (empty() && SteadyClock::now() - start < kSpin)
            for (int i = 0; i < 16 && empty(); ++i) relax();
        const auto left = [&] { return timeout_seconds - std::chrono::duration<double>(SteadyClock::now() - start).count(); };
        if (empty() && left() > 0) sleep(left());
    }
    if (empty()) return std::nullopt;
    const std::uint32_t popped = state_->popped.load(std::memory_order_relaxed);
    const std::uint64_t word = state_->words[popped % RingState::kCapacity];
    state_->popped.store(popped + 1, std::memory_order_release);
    return word;
}

bool Ring::empty() const {
    return state_->pushed.load(std::memory_order_acquire) == state_->popped.load(std::memory_order_relaxed);
}

/// Returns when there is a word, when the time is over, or sometimes without a reason.
void Ring::sleep(double timeout_seconds) {
    const std::uint32_t popped = state_->popped.load(std::memory_order_relaxed);
    state_->sleeping.store(1);
    if (state_->pushed.load() == popped) sleep_on(state_->pushed, popped, timeout_seconds);
    state_->sleeping.store(0);
}

}  // namespace rworker
