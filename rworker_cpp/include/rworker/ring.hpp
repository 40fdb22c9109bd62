// A one-way queue of words between two processes that share memory: a bell to ring, with a message on it.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

namespace rworker {

/// As it lies in memory; all zeros is an empty ring. One process pushes, one pops.
struct RingState {
    static constexpr std::uint32_t kCapacity = 1024;

    alignas(64) std::atomic<std::uint32_t> pushed;  // words so far, and what the reader sleeps on
    alignas(64) std::atomic<std::uint32_t> popped;
    alignas(64) std::atomic<std::uint32_t> sleeping;  // the reader is, or is about to be
    alignas(64) std::uint64_t words[kCapacity];
};

/// One end of a ring. What the other process writes may be wrong, and is never an address.
class Ring {
  public:
    /// `memory` holds a RingState, aligned to 64 bytes, and outlives this.
    explicit Ring(void* memory) : state_(static_cast<RingState*>(memory)) {}

    /// Throws Error when the reader has left the ring full.
    void push(std::uint64_t word);
    /// The next word; waits for it at most `timeout_seconds`, spinning for the first 20 us and then asleep.
    std::optional<std::uint64_t> pop(double timeout_seconds);

  private:
    bool empty() const;
    void sleep(double timeout_seconds);

    RingState* state_;
};

}  // namespace rworker
