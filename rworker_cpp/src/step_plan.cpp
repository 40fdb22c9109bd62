#include "rworker/step_plan.hpp"

#include <algorithm>

namespace rworker {
namespace {

constexpr std::int64_t kItemOverheadBytes = 2048;
constexpr std::int64_t kRowsPerPass = 4;  // stacked query rows that cost no more than reading the cache

PlannedSpan plan_span(const KVCache& cache, const LayerSpec& layer, const Span& span) {
    PlannedSpan planned{};
    planned.blocks = cache.sequence(span.sequence_id).blocks.data();
    planned.context_len = span.context_len;
    planned.num_rows = span.num_rows;
    planned.attends = span.attends;
    planned.first_token = span.context_len;
    if (span.attends)
        planned.first_token = layer.window ? std::max<std::int64_t>(0, span.context_len - layer.window + 1) : 0;
    planned.first_split = planned.first_token / kSplitTokens;
    planned.num_splits = (planned.end() - 1) / kSplitTokens - planned.first_split + 1;
    planned.partial_stride = partial_floats(span.num_rows * layer.group(), layer.value_dim);
    return planned;
}

}  // namespace

WorkList::WorkList(const KVCache& cache, const LayerSpec& layer, std::span<const Span> step_spans, bool sort_units) {
    const std::int64_t token_bytes = (layer.key_dim + layer.value_dim) * item_bytes(cache.dtype());
    std::int64_t next_row = 0, num_counters = 0;
    for (const Span& span : step_spans) {
        PlannedSpan planned = plan_span(cache, layer, span);
        planned.first_row = next_row;
        next_row += span.num_rows;
        if (planned.attends && planned.num_splits > 1) {
            planned.partial_offset = partial_floats;
            partial_floats += planned.partial_stride * planned.num_splits * layer.num_kv_heads;
            planned.counter_offset = num_counters;
            num_counters += layer.num_kv_heads;
        } else if (planned.attends) {
            own_partial_floats = std::max(own_partial_floats, planned.partial_stride);
        }
        const std::int64_t passes =
            planned.attends ? (span.num_rows * layer.group() + kRowsPerPass - 1) / kRowsPerPass : 1;
        for (std::int64_t i = 0; i < planned.num_splits; ++i) {
            const std::int64_t begin = std::max((planned.first_split + i) * kSplitTokens, planned.first_token);
            const std::int64_t end = std::min((planned.first_split + i + 1) * kSplitTokens, planned.end());
            const std::int64_t bytes = (end - begin) * token_bytes;
            units.push_back({std::int32_t(spans.size()), std::int32_t(planned.first_split + i),
                             bytes * passes + kItemOverheadBytes});
            cost += units.back().cost * layer.num_kv_heads;
            if (planned.attends) bytes_read += bytes * layer.num_kv_heads;
        }
        spans.push_back(planned);
    }
    num_items = std::int64_t(units.size()) * layer.num_kv_heads;
    splits_left = std::make_unique<std::atomic<std::int32_t>[]>(num_counters);
    for (const PlannedSpan& span : spans)
        for (std::int64_t head = 0; span.attends && span.num_splits > 1 && head < layer.num_kv_heads; ++head)
            splits_left[span.counter_offset + head].store(std::int32_t(span.num_splits), std::memory_order_relaxed);
    if (sort_units)
        std::stable_sort(units.begin(), units.end(),
                         [](const WorkUnit& a, const WorkUnit& b) { return a.cost > b.cost; });
}

}  // namespace rworker
