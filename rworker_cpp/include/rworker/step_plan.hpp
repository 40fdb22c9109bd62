// What one mini-batch asks of one kind of layer. It is computed once per step and used by every such layer.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "rworker/kv_cache.hpp"
#include "rworker/shared_splits.hpp"

namespace rworker {

/// A span, its rows in the payload, and the place of its partial results.
struct PlannedSpan {
    const std::int32_t* blocks;
    std::int64_t context_len, num_rows;
    std::int64_t end;               // of the tokens it stores or reads
    std::int64_t first_row;         // of the queries
    std::int64_t first_stored_row;  // of keys and values
    std::int64_t first_out_row;     // of out, or of the partial results where there are nodes
    std::int64_t first_token;  // the earliest token that any row sees
    std::int64_t first_split, num_splits;
    std::int64_t first_partial;  // index of its partial results, [token][split]
    std::int64_t counter_offset;
    std::int32_t num_units;  // units of work that compute it
    std::int32_t num_nodes;  // of each row, where partial results are returned; else 0
    SpanMode mode;
    bool is_cut;  // several units compute its own split, and a separate unit first stores its rows

    bool attends() const { return mode != SpanMode::append; }
    bool stores() const { return mode < SpanMode::read; }
    /// True if one thread computes the whole span: its only split holds new tokens, so no other span reads that split.
    bool one_unit() const { return num_splits == 1 && mode != SpanMode::read && !is_cut; }
};

/// Some new tokens and one split that they read; together with a KV head it is a piece of work. It includes all
/// sequences that share the blocks of the split.
struct WorkUnit {
    std::int32_t span;  // the span whose blocks are read and whose new tokens are stored
    std::int64_t split;
    std::int64_t first_token;  // in WorkList::tokens
    std::int64_t num_tokens;   // 0: the unit only stores
    std::int64_t cost;         // per head, in bytes; arithmetic counts as the bytes read in its time
    std::int32_t stored = -1;  // of cut rows: index, with heads fastest, of the flag that says they are stored

    bool stores_for_others() const { return stored >= 0 && num_tokens == 0; }
    bool waits() const { return stored >= 0 && num_tokens > 0; }
};

/// A unit and the heads that one thread computes in turn.
struct WorkItem {
    const WorkUnit* unit;
    std::int64_t first_head, end_head;
};

/// Floats of one token's partial results of one split in one KV head; in an index layer, of its scores.
inline std::int64_t token_floats(const LayerSpec& layer) {
    return layer.index() ? score_floats(layer.num_heads, layer.index()->block)
                           : layer.group() * partial_floats(layer.value_dim);
}

/// All units of one mini-batch for layers of one shape. There are no barriers: the thread that finishes the last unit
/// of a (span, KV head) merges; `units_left` tells it. Units that store rows for others come first and never wait. So a
/// unit that waits was claimed after the unit it waits for.
struct WorkList {
    std::vector<PlannedSpan> spans;   // where queries see only their picks, each query is one span
    std::vector<PlannedSpan> stores;  // in that case, the spans whose rows are stored before any attention
    std::vector<TokenRow> tokens;  // first all attending tokens, in the payload's order; then tokens of shared splits
    std::vector<WorkUnit> units;   // units that store rows for others, then the largest first
    std::unique_ptr<std::atomic<std::int32_t>[]> units_left, stored_flags;
    std::int64_t num_stored = 0;
    std::int64_t num_queries = 0, most_tokens = 0;  // most_tokens: tokens of the longest sequence
    std::int64_t num_items = 0;
    std::int64_t cost = 0, bytes_read = 0;
    std::int64_t num_partials = 0;      // shared between threads, each with all heads
    std::int64_t num_own_partials = 0;  // of one thread, each of one KV head

    WorkList(const KVCache& cache, const LayerSpec& layer, std::span<const Span> spans);

    /// The spans that store rows.
    const std::vector<PlannedSpan>& stored() const { return layer_.picked_by < 0 ? spans : stores; }

    /// Items are (unit, KV head), heads fastest, since heads are neighbours in a block. Small units come last, each as
    /// one item with all heads.
    WorkItem item(std::int64_t index) const;

  private:
    PlannedSpan place(const KVCache& cache, const Span& span) const;
    void place_picking(const Index& index, const PlannedSpan& span);
    void place_partials(PlannedSpan& span);
    void plan_splits(const KVCache& cache);
    void plan_shared(const SharedSplit& shared);
    void add_units(std::int32_t span, std::int64_t split, std::int64_t first_token, std::int64_t num_tokens);
    static bool committed(const PlannedSpan& span, std::int64_t split);
    void order_units();

    LayerSpec layer_;
    std::int64_t token_bytes_;  // of keys and values in one KV head
    std::int64_t num_large_units_ = 0;
};

}  // namespace rworker
