// What one mini-batch asks of one kind of layer, worked out once per step and used by every such layer.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "rworker/kv_cache.hpp"

namespace rworker {

/// A span, where its rows lie in the payload, and how its partial results are kept.
struct PlannedSpan {
    const std::int32_t* blocks;
    std::int64_t context_len, num_rows, first_row;
    std::int64_t first_token;  // the earliest one any row sees
    std::int64_t first_split, num_splits;
    std::int64_t partial_offset, partial_stride;  // floats; partials lie [kv head][split]
    std::int64_t counter_offset;
    bool attends;

    std::int64_t end() const { return context_len + num_rows; }
};

/// The part of a span that lies in one split; with a KV head it is a work item.
struct WorkUnit {
    std::int32_t span, split;
    std::int64_t cost;  // bytes, with arithmetic and overheads counted as the bytes read meanwhile
};

/// All units of one mini-batch for layers of one shape. No barriers: whoever finishes the last split of a (span,
/// KV head), told by `splits_left`, merges.
struct WorkList {
    std::vector<PlannedSpan> spans;
    std::vector<WorkUnit> units;  // largest first
    std::unique_ptr<std::atomic<std::int32_t>[]> splits_left;
    std::int64_t num_items = 0;  // units x KV heads
    std::int64_t cost = 0, bytes_read = 0;
    std::int64_t partial_floats = 0;      // shared between threads, for spans of several splits
    std::int64_t own_partial_floats = 0;  // of a thread, for spans of one split

    WorkList(const KVCache& cache, const LayerSpec& layer, std::span<const Span> spans, bool sort_units);
};

}  // namespace rworker
