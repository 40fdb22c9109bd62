#include "rworker/step_plan.hpp"

#include <algorithm>
#include <bit>

#include "rworker/attention_job.hpp"
#include "rworker/picks.hpp"
#include "rworker/state_job.hpp"
#include "rworker/worker.hpp"

namespace rworker {
namespace {

constexpr std::int64_t kHeadOverheadBytes = 1024;
constexpr std::int64_t kMostParts = 64;  // rows that attend to their own split are shared by this many threads
constexpr std::int64_t kCutBlocks = 16;  // with one KV head, rows are cut from this number of kBlockRows on
constexpr std::int64_t kLargeUnitBytes = 16'384;  // per head: above this, the cost of claiming an item does not matter

}  // namespace

WorkList::WorkList(const KVCache& cache, const LayerSpec& layer, std::span<const Span> step_spans)
    : layer_(layer), token_bytes_(token_bytes(layer, cache.dtype())) {
    std::int64_t next_row = 0, next_stored = 0, next_out = 0, next_node = 0, num_counters = 0;
    for (const Span& span : step_spans) {
        PlannedSpan planned = place(cache, span);
        planned.first_row = next_row;
        planned.first_stored_row = next_stored;
        planned.first_out_row = span.is_partial() ? next_node : next_out;
        planned.counter_offset = num_counters;
        most_tokens = std::max(most_tokens, planned.end);
        if (layer.picked_by < 0)
            place_partials(planned);
        else
            place_picking(*cache.layers()[layer.picked_by].index(), planned);
        next_row += span.num_rows;
        next_stored += span.is_stored() ? span.num_rows : 0;
        next_out += span.mode == SpanMode::attend ? span.num_rows : 0;
        next_node += span.num_rows * span.num_nodes();
        num_counters += planned.attends() && !planned.one_unit() ? layer.num_kv_heads : 0;
        (layer.picked_by < 0 ? spans : stores).push_back(planned);
    }
    num_queries = next_row;
    if (layer.picked_by < 0)
        plan_splits(cache);
    else
        num_counters = std::int64_t(spans.size()) * layer.num_kv_heads;
    order_units();
    stored_flags = std::make_unique<std::atomic<std::int32_t>[]>(num_stored);
    units_left = std::make_unique<std::atomic<std::int32_t>[]>(num_counters);
    for (const PlannedSpan& span : spans)
        for (std::int64_t head = 0; span.attends() && !span.one_unit() && head < layer.num_kv_heads; ++head)
            units_left[span.counter_offset + head].store(span.num_units, std::memory_order_relaxed);
}

/// Which tokens and splits a span covers. If no row sees any token of a range, the range is read at its last token, so
/// that its rows get empty results.
PlannedSpan WorkList::place(const KVCache& cache, const Span& span) const {
    const Sequence& sequence = cache.sequence(span.sequence_id);
    PlannedSpan planned{};
    planned.blocks = sequence.blocks.data();
    planned.context_len = planned.first_token = span.context_len;
    planned.num_rows = span.num_rows;
    planned.end = span.mode == SpanMode::read ? sequence.length : span.context_len + span.num_rows;
    planned.mode = span.mode;
    planned.num_nodes = std::int32_t(span.num_nodes());
    if (span.mode > SpanMode::read) planned.end = sequence.pending_length;
    if (span.mode == SpanMode::again_partial) planned.num_nodes = std::int32_t(num_nodes_of(planned.end));
    planned.is_cut = planned.attends() && span.is_stored() && layer_.num_kv_heads == 1 && !layer_.index() &&
                     layer_.picked_by < 0 &&
                     span.num_rows * layer_.group() >= kCutBlocks * kBlockRows;
    if (planned.attends())
        planned.first_token = layer_.first_seen(span.context_len);
    planned.first_token = std::min(planned.first_token, planned.end - 1);
    planned.first_split = planned.first_token / kSplitTokens;
    planned.num_splits = (planned.end - 1) / kSplitTokens - planned.first_split + 1;
    return planned;
}

/// Creates a place for every token and split, and rows that refer to it.
void WorkList::place_partials(PlannedSpan& span) {
    if (!span.attends()) return;
    const std::int64_t count = span.num_rows * span.num_splits;
    if (span.one_unit()) {
        num_own_partials = std::max(num_own_partials, count);
    } else {
        span.first_partial = num_partials;
        num_partials += count;
    }
    for (std::int64_t i = 0; i < span.num_rows; ++i)
        tokens.push_back({span.context_len + i, std::int32_t(span.first_row + i), std::int32_t(spans.size()),
                          span.first_partial + i * span.num_splits - span.first_split,
                          layer_.first_seen(span.context_len + i)});
}

/// Handles each query of the span separately, over its picked tokens as if they were a sequence. In a range it plans as
/// many as may be picked there, in splits that form one node.
void WorkList::place_picking(const Index& index, const PlannedSpan& span) {
    for (std::int64_t i = 0; span.attends() && i < span.num_rows; ++i) {
        const PickedTokens tokens_of(index, std::min(span.context_len + i, span.end - 1), span.end);
        PlannedSpan query = span;
        query.context_len = tokens_of.seen - 1;
        query.num_rows = 1;
        query.end = tokens_of.stored;
        query.first_row += i;
        query.first_out_row += i * std::max<std::int64_t>(span.num_nodes, 1);
        query.first_token = query.first_split = 0;
        query.num_splits = (tokens_of.seen - 1) / kSplitTokens + 1;
        if (span.num_nodes > 0) query.num_splits = std::int64_t(std::bit_ceil(std::uint64_t(query.num_splits)));
        query.counter_offset = std::int64_t(spans.size()) * layer_.num_kv_heads;
        place_partials(query);
        spans.push_back(query);
        for (std::int64_t split = 0; split < query.num_splits; ++split)
            add_units(std::int32_t(spans.size()) - 1, split, std::int64_t(tokens.size()) - 1, 1);
    }
}

void WorkList::plan_splits(const KVCache& cache) {
    const std::int64_t split_blocks = kSplitTokens / cache.block_size();
    SharedSplits shared;
    for (std::int32_t i = 0; i < std::int32_t(spans.size()); ++i) {
        const PlannedSpan& span = spans[i];
        for (std::int64_t split = span.first_split; split < span.first_split + span.num_splits; ++split) {
            const std::int64_t next_block = (split + 1) * split_blocks;
            const bool by_many = span.mode == SpanMode::read;  // and other spans may read it too
            if (committed(span, split) && (by_many || cache.pool().shared(span.blocks[next_block - 1])))
                shared.add(split, span.blocks[next_block - 1], i);
            else
                add_units(i, split, span.first_row, span.attends() ? span.num_rows : 0);
        }
    }
    for (const SharedSplit& split : shared.all()) plan_shared(split);
}

void WorkList::plan_shared(const SharedSplit& shared) {
    const PlannedSpan& first = spans[shared.spans[0]];
    if (shared.spans.size() == 1) return add_units(shared.spans[0], shared.split, first.first_row, first.num_rows);
    const std::int64_t first_token = std::int64_t(tokens.size());
    std::int32_t longest = shared.spans[0];  // with a window, this row looks back the farthest
    for (const std::int32_t i : shared.spans) {
        if (spans[i].first_token < spans[longest].first_token) longest = i;
        for (std::int64_t row = 0; row < spans[i].num_rows; ++row)
            tokens.push_back(TokenRow(tokens[spans[i].first_row + row]));
    }
    add_units(longest, shared.split, first_token, std::int64_t(tokens.size()) - first_token);
}

/// Cuts the tokens into parts for several threads. Tokens that are stored into this split stay together, or many units
/// would wait for the one that stores.
void WorkList::add_units(std::int32_t span, std::int64_t split, std::int64_t first_token, std::int64_t num_tokens) {
    const std::int64_t begin = std::max(split * kSplitTokens, spans[span].first_token);
    const std::int64_t end = std::min((split + 1) * kSplitTokens, spans[span].end);
    const std::int64_t bytes = std::max<std::int64_t>(end - begin, 0) * token_bytes_;  // 0: a split that is only filled
    if (num_tokens > 0) bytes_read += bytes * layer_.num_kv_heads;
    std::int64_t most = std::max<std::int64_t>(num_tokens, 1);
    const std::int64_t fit = std::max<std::int64_t>(kBlockRows / layer_.group(), 1);
    const std::int64_t blocks = (num_tokens + fit - 1) / fit;
    std::int32_t stored_by = -1;
    if (num_tokens > 0 && committed(spans[span], split)) {
        most = (num_tokens + blocks - 1) / blocks;  // evenly, since few tokens read as much as many
    } else if (num_tokens > 0 && spans[span].is_cut) {
        most = fit * ((blocks + kMostParts - 1) / kMostParts);
        stored_by = std::int32_t(num_stored);
        num_stored += layer_.num_kv_heads;
        units.push_back({span, split, first_token, 0, bytes + kHeadOverheadBytes, stored_by});
    }
    for (std::int64_t done = 0; done == 0 || done < num_tokens; done += most) {
        const std::int64_t count = std::min(most, num_tokens - done);
        const std::int64_t multiply_adds = count * layer_.group() * (end - begin) * (layer_.key_dim + layer_.value_dim);
        units.push_back({span, split, first_token + done, count,
                         std::max(bytes, multiply_adds / kMultiplyAddsPerByte) + kHeadOverheadBytes, stored_by});
        for (std::int64_t i = 0; i < count; ++i)
            if (i == 0 || tokens[first_token + done + i].span != tokens[first_token + done + i - 1].span)
                ++spans[tokens[first_token + done + i].span].num_units;
    }
}

bool WorkList::committed(const PlannedSpan& span, std::int64_t split) {
    return span.attends() && (split + 1) * kSplitTokens <= span.context_len;
}

void WorkList::order_units() {
    const auto size = [](const WorkUnit& unit) { return unit.stores_for_others() ? INT64_MAX : unit.cost; };
    std::stable_sort(units.begin(), units.end(),
                     [&](const WorkUnit& a, const WorkUnit& b) { return size(a) > size(b); });
    const auto small =
        std::find_if(units.begin(), units.end(), [&](const WorkUnit& unit) { return size(unit) < kLargeUnitBytes; });
    num_large_units_ = small - units.begin();
    num_items = num_large_units_ * layer_.num_kv_heads + (units.end() - small);
    for (const WorkUnit& unit : units) cost += unit.cost * layer_.num_kv_heads;
}

WorkItem WorkList::item(std::int64_t index) const {
    const std::int64_t heads = layer_.num_kv_heads, large = num_large_units_ * heads;
    if (index >= large) return {&units[num_large_units_ + index - large], 0, heads};
    return {&units[index / heads], index % heads, index % heads + 1};
}

void Worker::plan(std::span<const std::vector<Span>> mini_batches) {
    mini_batches_.clear();
    std::int64_t shared = 0, own = 0;
    for (const std::vector<Span>& spans : mini_batches) {
        MiniBatch& mini_batch = mini_batches_.emplace_back();
        for (const Span& span : spans) {
            mini_batch.rows.queries += span.has_queries() ? span.num_rows : 0;
            mini_batch.rows.stored += span.is_stored() ? span.num_rows : 0;
            mini_batch.rows.out += span.mode == SpanMode::attend ? span.num_rows : 0;
            mini_batch.rows.own += span.has_queries() && span.is_stored() ? span.num_rows : 0;
            mini_batch.rows.partials += span.num_rows * span.num_nodes();
        }
        for (const std::int64_t layer : shapes_) {
            const LayerSpec& spec = cache_.layers()[layer];
            mini_batch.lists.push_back(std::make_unique<WorkList>(cache_, spec, spans));
            const std::int64_t floats = token_floats(spec);
            shared = std::max(shared, mini_batch.lists.back()->num_partials * spec.num_kv_heads * floats);
            own = std::max(own, mini_batch.lists.back()->num_own_partials * floats);
        }
        mini_batch.submitted.resize(cache_.layers().size());
        if (absorptions_.size() < mini_batches_.size())
            absorptions_.push_back(
                std::make_unique<Absorption>(kernels_, model_dtype_, pool_.num_threads()));
        const RowCount& rows = mini_batch.rows;
        absorptions_[mini_batches_.size() - 1]->reserve(cache_.layers(), rows.queries, rows.out, rows.partials);
        if (!cache_.states().num_blocks()) continue;
        if (state_jobs_.size() < mini_batches_.size())
            state_jobs_.push_back(
                std::make_unique<StateJob>(cache_, state_kernels(kernels_), model_dtype_, pool_.num_threads()));
        state_jobs_[mini_batches_.size() - 1]->plan(spans);
    }
    while (jobs_.size() < mini_batches_.size()) jobs_.push_back(std::make_unique<AttentionJob>(*this));
    for (const auto& job : jobs_) job->forget_picks();
    if (std::int64_t(shared_partials_.size()) < shared) shared_partials_.resize(shared);
    for (std::vector<float>& floats : own_partials_)
        if (std::int64_t(floats.size()) < own) floats.resize(own);
    const std::size_t cells = mini_batches_.size() * cache_.layers().size();
    report_ = {std::vector<double>(cells), std::vector<double>(cells), 0, 0};
}

}  // namespace rworker
