#include "rworker/ring.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <chrono>
#include <string>

#include "rworker/types.hpp"
#include "spin.hpp"

namespace rworker {
namespace {

using SteadyClock = std::chrono::steady_clock;

static_assert(std::atomic<std::uint32_t>::is_always_lock_free, "processes share these");

/// The plain futex, not std::atomic's wait: that one is private to a process.
long futex(std::atomic<std::uint32_t>& word, int operation, std::uint32_t value, const timespec* timeout) {
    return syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), operation, value, timeout, nullptr, 0);
}

}  // namespace

void Ring::push(std::uint64_t word) {
    const std::uint32_t pushed = state_->pushed.load(std::memory_order_relaxed);
    if (pushed - state_->popped.load(std::memory_order_acquire) >= RingState::kCapacity)
        throw Error("the ring is full: the other process has not read " + std::to_string(RingState::kCapacity) +
                    " words");
    state_->words[pushed % RingState::kCapacity] = word;
    // Sequentially consistent with the reader's: either it sees the word before it sleeps, or we see that it sleeps.
    state_->pushed.store(pushed + 1);
    if (state_->sleeping.load() != 0) futex(state_->pushed, FUTEX_WAKE, 1, nullptr);
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

/// Returns when there is a word, when the time is over, or now and then for no reason.
void Ring::sleep(double timeout_seconds) {
    const std::uint32_t popped = state_->popped.load(std::memory_order_relaxed);
    const auto whole = static_cast<time_t>(timeout_seconds);
    const timespec timeout{whole, static_cast<long>((timeout_seconds - double(whole)) * 1e9)};
    state_->sleeping.store(1);
    if (state_->pushed.load() == popped) futex(state_->pushed, FUTEX_WAIT, popped, &timeout);
    state_->sleeping.store(0);
}

}  // namespace rworker
