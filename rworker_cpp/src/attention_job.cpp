#include "rworker/attention_job.hpp"

#include <algorithm>

namespace rworker {
namespace {

// About what one thread reads while another wakes up (32 us at 10 GB/s).
constexpr std::int64_t kWorthHelpersBytes = 320'000;

template <class Pointer>
Pointer advance(Pointer data, std::int64_t elements, DType dtype) {
    using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>, const std::uint8_t, std::uint8_t>;
    return static_cast<Byte*>(data) + elements * item_bytes(dtype);
}

}  // namespace

void AttentionJob::prepare(const WorkList& list, std::int64_t layer, const Payload& payload) {
    list_ = &list;
    layer_ = layer;
    spec_ = &worker_.cache_.layers()[layer];
    payload_ = payload;
    num_items_ = list.num_items;
    worth_helpers_ = list.num_items > 1 && list.cost > kWorthHelpersBytes;
}

void AttentionJob::run(std::int64_t item, int thread) noexcept {
    const WorkUnit& unit = list_->units[item / spec_->num_kv_heads];
    const std::int64_t head = item % spec_->num_kv_heads;
    const PlannedSpan& span = list_->spans[unit.span];
    append(span, unit.split, head);
    if (span.attends) attend(span, unit.split, head, thread);
}

void AttentionJob::append(const PlannedSpan& span, std::int64_t split, std::int64_t head) const {
    const std::int64_t begin = std::max(span.context_len, split * kSplitTokens);
    const std::int64_t end = std::min(span.end(), (split + 1) * kSplitTokens);
    if (begin >= end) return;
    const DType dtype = worker_.model_dtype_;
    const std::int64_t row = (span.first_row + begin - span.context_len) * spec_->num_kv_heads + head;
    worker_.kernels_.append[int(worker_.cache_.dtype())]({
        .view = worker_.cache_.view(layer_, head, span.blocks),
        .dtype = dtype,
        .keys = advance(payload_.keys, row * spec_->key_dim, dtype),
        .values = advance(payload_.values, row * spec_->value_dim, dtype),
        .key_stride = spec_->num_kv_heads * spec_->key_dim,
        .value_stride = spec_->num_kv_heads * spec_->value_dim,
        .begin = begin,
        .end = end,
        .key_dim = int(spec_->key_dim),
        .value_dim = int(spec_->value_dim),
    });
}

void AttentionJob::attend(const PlannedSpan& span, std::int64_t split, std::int64_t head, int thread) const {
    const bool alone = span.num_splits == 1;
    float* const partials =
        alone ? worker_.own_partials_[thread].data()
              : worker_.shared_partials_.data() + span.partial_offset + head * span.num_splits * span.partial_stride;
    const DType dtype = worker_.model_dtype_;
    worker_.kernels_.attend[int(worker_.cache_.dtype())]({
        .view = worker_.cache_.view(layer_, head, span.blocks),
        .dtype = dtype,
        .queries = advance(payload_.queries, first_element(span, head, spec_->key_dim), dtype),
        .rows = rows_of(span, spec_->key_dim),
        .first_position = span.context_len,
        .begin = split * kSplitTokens,
        .end = std::min(span.end(), (split + 1) * kSplitTokens),
        .window = spec_->window,
        .scale = spec_->scale,
        .soft_cap = spec_->soft_cap,
        .key_dim = int(spec_->key_dim),
        .value_dim = int(spec_->value_dim),
        .partial = partials + (split - span.first_split) * span.partial_stride,
        .scratch = worker_.scratch_[thread].data(),
    });
    if (alone) return merge(span, head, partials, thread);
    std::atomic<std::int32_t>& left = list_->splits_left[span.counter_offset + head];
    if (left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    left.store(std::int32_t(span.num_splits), std::memory_order_relaxed);  // for the next layer
    merge(span, head, partials, thread);
}

void AttentionJob::merge(const PlannedSpan& span, std::int64_t head, const float* partials, int thread) const {
    const DType dtype = worker_.model_dtype_;
    worker_.kernels_.merge({
        .partials = partials,
        .num_partials = span.num_splits,
        .partial_stride = span.partial_stride,
        .rows = rows_of(span, spec_->value_dim),
        .value_dim = int(spec_->value_dim),
        .sinks = spec_->sinks.empty() ? nullptr : spec_->sinks.data() + head * spec_->group(),
        .dtype = dtype,
        .out = advance(payload_.out, first_element(span, head, spec_->value_dim), dtype),
        .scratch = worker_.scratch_[thread].data(),
    });
}

RowView AttentionJob::rows_of(const PlannedSpan& span, std::int64_t head_dim) const {
    return {span.num_rows * spec_->group(), int(spec_->group()), spec_->num_heads * head_dim, head_dim};
}

std::int64_t AttentionJob::first_element(const PlannedSpan& span, std::int64_t head, std::int64_t head_dim) const {
    return (span.first_row * spec_->num_heads + head * spec_->group()) * head_dim;
}

}  // namespace rworker
