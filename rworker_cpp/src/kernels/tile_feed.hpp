// Prefetches the next chunk while this one is used.
#pragma once

#include "kernels/ahead.hpp"

namespace {

constexpr int kMaxChunkTiles = 16;  // of a tile kernel's chunk

/// Loads keys and values of some tiles into the second-level cache: eight parallel streams, line by line, spread evenly
/// over the work on the previous chunk. It ignores AttendArgs' read-ahead, since one run is slow where there are tile
/// registers. A stream is a tile, or two neighbours, which share a page in most blocks.
class Feed {
  public:
    /// `tiles` [count], of these sizes; `units`: the number of calls of ask(), with their weights.
    void start(const Tile* tiles, int count, int64_t key_bytes, int64_t value_bytes, int64_t units) {
        tiles_ = tiles, count_ = count, key_bytes_ = key_bytes, value_bytes_ = value_bytes;
        per_stream_ = (count + kStreams - 1) / kStreams;
        pass_ = -1, owed_ = 0, rate_ = 0;
        if (count == 0) return;
        const int64_t steps = per_stream_ * (key_bytes + value_bytes) / kLine;
        rate_ = int((steps * kOne + units - 1) / units);
        next_pass();
    }

    /// Prefetches the lines that are due after `weight` units of work.
    [[gnu::always_inline]] void ask(int weight = 1) {
        owed_ += rate_ * weight;
        while (owed_ >= kOne) {
            owed_ -= kOne;
            step();
        }
    }

  private:
    static constexpr int kOne = 1 << 12, kLine = 64;

    [[gnu::always_inline]] void step() {
        RWORKER_UNROLL
        for (int i = 0; i < kStreams; ++i) {
            __builtin_prefetch(streams_[i] + offset_, 0, 2);
        }
        offset_ += kLine;
        if (offset_ >= end_) next_pass();
    }

    /// Begins the next pass: every stream's first tile of the keys, then of the values, then every second tile. Streams
    /// without one stay on the last.
    [[gnu::noinline]] void next_pass() {
        ++pass_;
        const bool values = pass_ >= per_stream_;
        if (pass_ >= 2 * per_stream_) {
            owed_ = rate_ = 0;
            return;
        }
        for (int i = 0; i < kStreams; ++i) {
            const int wanted = i * per_stream_ + pass_ % per_stream_;
            const Tile& tile = tiles_[wanted < count_ ? wanted : count_ - 1];
            streams_[i] = values ? tile.values : tile.keys;
        }
        offset_ = 0, end_ = values ? value_bytes_ : key_bytes_;
    }

    const uint8_t* streams_[kStreams];
    const Tile* tiles_;
    int64_t key_bytes_, value_bytes_, offset_, end_;
    int count_, per_stream_, pass_, owed_, rate_;
};

/// Prefetches the lines of a tile register that will be loaded soon, from the second-level cache.
[[gnu::always_inline]] inline void fetch_tile(const uint8_t* data, int64_t stride) {
    RWORKER_UNROLL
    for (int i = 0; i < 4; ++i, data += 4 * stride) {
        __asm__("" : "+r"(data));  // otherwise g++ keeps all multiples of a stride in memory
        __builtin_prefetch(data), __builtin_prefetch(data + stride);
        __builtin_prefetch(data + 2 * stride), __builtin_prefetch(data + 3 * stride);
    }
}

}  // namespace
