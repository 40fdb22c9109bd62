// Prefetches the tiles of the next chunk while this one is used.
#pragma once

#include "kernels/stored.hpp"

namespace {

using rworker::kChunkTokens;
using rworker::kMaxChunkTokens;
using rworker::kStreams;
using rworker::ReadAhead;

template <class L, DType D>
constexpr int chunk_tokens = rworker::is_quantized(D) ? L::code_chunk : kChunkTokens;

constexpr int kCacheLineBytes = 64;

/// What a call reads after this chunk: tiles of keys, then the same number of tiles of values.
struct Coming {
    const uint8_t *keys[kMaxChunkTokens / kTileTokens], *values[kMaxChunkTokens / kTileTokens];
    int num_tiles = 0;           // keys[0] is a valid address even where there are none
    int key_lines, value_lines;  // of a tile
    ReadAhead read_ahead;        // pages: where num_tiles is a multiple of kStreams / 2

    void add(const Tile& tile) {
        keys[num_tiles] = tile.keys;
        values[num_tiles++] = tile.values;
    }
};

/// Prefetches tiles line by line, spread evenly over the work on this chunk. Blocks are short, so the hardware's own
/// prefetchers end before they help. It prefetches either one ascending run, which restarts the hardware's prefetchers,
/// or one line of every tile in turn, in as many pages. A run may end in the second-level cache, since the first has
/// few buffers for lines on their way (24 on Zen 4) and still holds lines of this chunk. An R-worker measures at its
/// start which is fastest.
class Ahead {
  public:
    /// The groups of rows read the chunk one after another. Each prefetches its share during its products, and each row
    /// its share during its softmax: `softmax` units beside `products` units of the groups.
    Ahead(const Coming& coming, int num_groups, int rows = 1, int softmax = 0, int products = 1)
        : coming_(&coming), every_(kUnit * num_groups * (products + softmax) / products) {
        const int bytes = coming.num_tiles * (coming.key_lines + coming.value_lines) * kCacheLineBytes;
        row_bytes_ = bytes / (products + softmax) * softmax / rows;
        begin_run();
    }

    /// Prefetches as many lines as `Bytes` bytes take, on average; for one group.
    template <int Bytes>
    [[gnu::always_inline]] void ask() {
        if ((until_ -= kUnit) > 0) return;
        until_ += every_;
        RWORKER_UNROLL
        for (int i = 0; i < Bytes / kCacheLineBytes; ++i) next_line();
        if constexpr (Bytes % kCacheLineBytes != 0) {
            owed_ += Bytes % kCacheLineBytes;
            if (owed_ >= kCacheLineBytes) owed_ -= kCacheLineBytes, next_line();
        }
    }

    /// The same for many rows, where arithmetic limits the speed: one line after each vector of the cache, `each(i)`.
    template <int Bytes>
    [[gnu::always_inline]] void begin_asking() {
        from_ = nullptr;
        if ((until_ -= kUnit) > 0) return;
        until_ += every_;
        constexpr int lines = Bytes / kCacheLineBytes;
        if (left_ <= lines) return next_lines(lines);
        from_ = at_, at_ += Bytes, left_ -= lines;
    }

    [[gnu::always_inline]] void ask_one(int line) const {
        if (!from_) return;
        if (coming_->read_ahead == ReadAhead::run_l2)
            __builtin_prefetch(from_ + line * kCacheLineBytes, 0, 2);
        else
            __builtin_prefetch(from_ + line * kCacheLineBytes);
    }

    void ask_for_row() {
        const int lines = (owed_ += row_bytes_) / kCacheLineBytes;
        owed_ %= kCacheLineBytes;
        next_lines(lines);
    }

  private:
    static constexpr int kUnit = 16;

    [[gnu::noinline]] void next_lines(int lines) {
        for (; lines > 0; --lines) next_line();
    }

    [[gnu::always_inline]] void next_line() {
        if (coming_->read_ahead == ReadAhead::run_l2)
            __builtin_prefetch(at_, 0, 2);
        else
            __builtin_prefetch(at_);
        at_ += step_;
        if (--left_ == 0) ++run_, begin_run();
    }

    /// A run is a whole tile, or one line of it.
    [[gnu::always_inline]] void begin_run() {
        const Coming& coming = *coming_;
        if (coming.read_ahead != ReadAhead::pages && run_ < 2 * coming.num_tiles) {
            const bool of_keys = run_ < coming.num_tiles;
            at_ = of_keys ? coming.keys[run_] : coming.values[run_ - coming.num_tiles];
            left_ = of_keys ? coming.key_lines : coming.value_lines;
        } else if (coming.read_ahead == ReadAhead::pages && run_ < 2 * coming.num_tiles * coming.key_lines) {
            const int line = run_ / kStreams, stream = run_ % kStreams;
            const int tile = line / coming.key_lines * (kStreams / 2) + stream % (kStreams / 2);
            at_ = (stream < kStreams / 2 ? coming.keys : coming.values)[tile] + line % coming.key_lines * kCacheLineBytes;
            left_ = 1;
        } else {
            stay();
        }
    }

    /// Stays on the line that was prefetched last, or on any line that is in the cache.
    void stay() {
        at_ = coming_->keys[0];
        step_ = 0;
        left_ = 0;
    }

    const Coming* coming_;
    const uint8_t* at_;
    int step_ = kCacheLineBytes, left_, run_ = 0, owed_ = 0, every_, until_ = 1;
    int row_bytes_;  // after the members that every copy reads
    const uint8_t* from_ = nullptr;
};

}  // namespace
