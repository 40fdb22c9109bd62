// A one-way queue of words between two processes that share memory. It wakes the reader and gives it a message.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

namespace rworker {

/// The ring in shared memory. All zeros is an empty ring. One process pushes, the other pops.
struct RingState {
    static constexpr std::uint32_t kCapacity = 1024;

    alignas(64) std::atomic<std::uint32_t> pushed;  // number of words pushed; the reader sleeps on it
    alignas(64) std::atomic<std::uint32_t> popped;
    alignas(64) std::atomic<std::uint32_t> sleeping;  // the reader sleeps, or is about to
    alignas(64) std::uint64_t words[kCapacity];
};

/// One end of a ring. Words of the other process may be wrong, so they are never used as addresses.
class Ring {
  public:
    /// `memory` holds a RingState, aligned to 64 bytes, and outlives this object.
    explicit Ring(void* memory) : state_(static_cast<RingState*>(memory)) {}

    /// Adds a word. Throws Error when the ring is full because the reader does not read.
    void push(std::uint64_t word);
    /// Returns the next word. It waits at most `timeout_seconds`: it spins for 20 us, then sleeps.
    std::optional<std::uint64_t> pop(double timeout_seconds);

  private:
    bool empty() const;
    void sleep(double timeout_seconds);

    RingState* state_;
};

}  // namespace rworker
