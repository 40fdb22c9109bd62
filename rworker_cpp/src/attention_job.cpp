#include "rworker/attention_job.hpp"

#include <algorithm>
#include <limits>

#include "rworker/values_of_keys.hpp"

namespace rworker {
namespace {

template <class Pointer>
Pointer advance(Pointer data, std::int64_t elements, DType dtype) {
    using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>, const std::uint8_t, std::uint8_t>;
    return static_cast<Byte*>(data) + elements * item_bytes(dtype);
}

void prefetch_to_write(const std::uint8_t* data, std::int64_t bytes) {
    for (std::int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(data + i, 1);
}

}  // namespace

void AttentionJob::prepare(const WorkList& list, std::int64_t layer, const Payload& payload) {
    list_ = &list;
    spec_ = &worker_.cache_.layers()[layer];
    payload_ = payload;
    for (std::int64_t i = 0; i < list.num_stored; ++i) list.stored_flags[i].store(0, std::memory_order_relaxed);
    begin(layer, list.num_items, list.cost, list.bytes_read);
    if (spec_->index()) {
        picks_.reset(layer, *spec_, list.num_queries, list.most_tokens);
        is_shared_ = false;
    }
    if (spec_->picked_by >= 0) store_all();
}

void AttentionJob::run(std::int64_t item, std::int64_t next_item, int thread) noexcept {
    const WorkItem work = list_->item(item);
    Piece after{nullptr, 0};
    if (next_item >= 0) {
        const WorkItem following = list_->item(next_item);
        after = {following.unit, following.first_head};
    }
    for (std::int64_t head = work.first_head; head < work.end_head; ++head) {
        const Piece piece{work.unit, head}, next = head + 1 < work.end_head ? Piece{work.unit, head + 1} : after;
        if (spec_->picked_by >= 0) {
            attend_picked(piece, next, thread);
            continue;
        }
        if (piece.unit->waits())
            list_->stored_flags[piece.unit->stored + head].wait(0, std::memory_order_acquire);
        else
            append(piece);
        if (next.unit && !next.unit->waits()) prefetch_append(next);
        if (piece.unit->num_tokens == 0) continue;
        const NextTokens tokens = next.unit ? tokens_of(next) : NextTokens{};
        attend(piece, next.unit ? &tokens : nullptr, thread);
    }
}

void AttentionJob::leave() noexcept {
    if (worker_.kernels_.release) worker_.kernels_.release();
}

void AttentionJob::append(const Piece& piece) const {
    const PlannedSpan& span = list_->spans[piece.unit->span];
    const std::int64_t begin = std::max(span.context_len, piece.unit->split * kSplitTokens);
    const std::int64_t end = std::min(span.end, (piece.unit->split + 1) * kSplitTokens);
    if (begin < end && span.stores()) append(span, piece.head, begin, end);
    if (!piece.unit->stores_for_others()) return;
    std::atomic<std::int32_t>& stored = list_->stored_flags[piece.unit->stored + piece.head];
    stored.store(1);  // sequentially consistent: otherwise notify_all might look for sleepers before the release
    stored.notify_all();
}

void AttentionJob::append(const PlannedSpan& span, std::int64_t head, std::int64_t begin, std::int64_t end) const {
    const DType dtype = worker_.model_dtype_;
    const std::int64_t row = (span.first_stored_row + begin - span.context_len) * spec_->num_kv_heads + head;
    worker_.kernels_.append[append_index(*spec_, worker_.cache_.dtype())]({
        .view = worker_.cache_.view(layer(), head, span.blocks),
        .dtype = dtype,
        .keys = advance(payload_.keys, row * spec_->key_dim, dtype),
        .values = advance(payload_.values, row * spec_->stored_value_dim(), dtype),
        .key_stride = spec_->num_kv_heads * spec_->key_dim,
        .value_stride = spec_->num_kv_heads * spec_->stored_value_dim(),
        .begin = begin,
        .end = end,
        .key_dim = int(spec_->key_dim),
        .value_dim = int(spec_->stored_value_dim()),
        .latent_dim = spec_->values_in_keys() ? int(spec_->value_dim) : 0,
        .keep_rows = spec_->keeps_rows(),
    });
}

void AttentionJob::attend(const Piece& piece, const NextTokens* next, int thread) const {
    const WorkUnit& unit = *piece.unit;
    const PlannedSpan& span = list_->spans[unit.span];
    const std::int64_t floats = token_floats(*spec_);
    float* partials = worker_.own_partials_[thread].data();
    std::int64_t partial_stride = floats;
    if (!span.one_unit()) {
        partials = worker_.shared_partials_.data() + piece.head * floats;
        partial_stride = spec_->num_kv_heads * floats;
    }
    TokenRow token = list_->tokens[unit.first_token];
    const bool is_shared = spec_->picked_by >= 0 && span.num_nodes > 0;
    if (is_shared) token.position = picked_tokens(piece).seen - 1;
    const std::int64_t end = end_of(piece);
    if (end <= unit.split * kSplitTokens) {
        float* const none = partials + (token.partials + unit.split) * partial_stride;
        std::fill_n(none, floats, 0.0f);
        for (std::int64_t i = 0; i < spec_->group(); ++i)
            none[i * partial_floats(spec_->value_dim)] = -std::numeric_limits<float>::infinity();
        return finish(piece, partials, partial_stride, thread);
    }
    const DType dtype = worker_.model_dtype_, stored = dtype_of(*spec_, worker_.cache_.dtype());
    const bool is_read_before = has_latent_codes(*spec_, stored);
    const auto* const kernels = spec_->index() ? worker_.kernels_.score : worker_.kernels_.attend;
    kernels[int(is_read_before ? dtype : stored)]({
        .view = view_to_attend(piece, thread),
        .dtype = dtype,
        .queries = advance(payload_.queries, piece.head * spec_->group() * spec_->query_dim(), dtype),
        .tokens = is_shared ? &token : list_->tokens.data() + unit.first_token,
        .num_tokens = unit.num_tokens,
        .token_stride = spec_->num_heads * spec_->query_dim(),
        .group = int(spec_->group()),
        .split = unit.split,
        .end = end,
        .scale = spec_->scale,
        .soft_cap = spec_->soft_cap,
        .alibi_slopes =
            spec_->alibi_slopes.empty() ? nullptr : spec_->alibi_slopes.data() + piece.head * spec_->group(),
        .key_dim = int(spec_->key_dim),
        .value_dim = int(spec_->value_dim),
        .partials = partials,
        .partial_stride = partial_stride,
        .next = is_read_before ? nullptr : next,
        .read_ahead = worker_.read_ahead_,
        .scratch = worker_.scratch_[thread].data(),
        .pick_block = spec_->index() ? spec_->index()->block : 0,
    });
    finish(piece, partials, partial_stride, thread);
}

void AttentionJob::finish(const Piece& piece, float* partials, std::int64_t stride, int thread) const {
    const PlannedSpan& span = list_->spans[piece.unit->span];
    if (span.one_unit()) return merge(span, piece.head, partials, stride, thread);
    count_off(*piece.unit, piece.head, thread);
}

/// Returns the view with values made from the keys that are read next, where values are not stored, or with keys and
/// values made from latent codes.
HeadView AttentionJob::view_to_attend(const Piece& piece, int thread) const {
    HeadView view = worker_.cache_.view(layer(), piece.head, list_->spans[piece.unit->span].blocks);
    if (spec_->index()) return view;
    NextTokens tokens = tokens_of(piece);
    std::uint8_t* const memory = worker_.split_values_[thread].data();
    std::uint8_t* const aligned = memory + (64 - reinterpret_cast<std::uintptr_t>(memory) % 64) % 64;
    if (spec_->values_in_keys()) view.split_values = aligned;
    if (spec_->picked_by >= 0) tokens.view = view = picked_view(piece, view, thread);
    if (!spec_->values_in_keys()) return view;
    if (has_latent_codes(*spec_, worker_.cache_.dtype()))
        return read_split(worker_.kernels_, *spec_, worker_.cache_.dtype(), worker_.model_dtype_, tokens, aligned);
    make_values(worker_.cache_.dtype(), view, tokens.begin, tokens.end, int(spec_->key_dim), int(spec_->value_dim));
    return view;
}

void AttentionJob::count_off(const WorkUnit& unit, std::int64_t head, int thread) const {
    float* const partials = worker_.shared_partials_.data() + head * token_floats(*spec_);
    const std::int64_t stride = spec_->num_kv_heads * token_floats(*spec_);
    const TokenRow* const tokens = list_->tokens.data() + unit.first_token;
    for (std::int64_t i = 0; i < unit.num_tokens; ++i) {
        if (i > 0 && tokens[i].span == tokens[i - 1].span) continue;
        const PlannedSpan& span = list_->spans[tokens[i].span];
        std::atomic<std::int32_t>& left = list_->units_left[span.counter_offset + head];
        if (left.fetch_sub(1, std::memory_order_acq_rel) != 1) continue;
        left.store(span.num_units, std::memory_order_relaxed);  // for the next layer
        merge(span, head, partials + span.first_partial * stride, stride, thread);
    }
}

void AttentionJob::merge(const PlannedSpan& span, std::int64_t head, float* partials, std::int64_t stride,
                         int thread) const {
    if (spec_->index()) return pick(span, partials, stride);
    const std::int64_t row = span.first_out_row * spec_->num_heads + head * spec_->group();
    const std::int64_t node_floats = rworker::node_floats(spec_->value_dim);
    MergeArgs args{
        .partials = partials,
        .first_split = span.first_split,
        .num_splits = span.num_splits,
        .partial_stride = stride,
        .num_tokens = span.num_rows,
        .token_stride = spec_->num_heads * spec_->value_dim,
        .group = int(spec_->group()),
        .value_dim = int(spec_->value_dim),
        .sinks = spec_->sinks.empty() ? nullptr : spec_->sinks.data() + head * spec_->group(),
        .dtype = worker_.model_dtype_,
        .out = advance(payload_.out, row * spec_->value_dim, worker_.model_dtype_),
        .scratch = worker_.scratch_[thread].data(),
    };
    if (span.num_nodes > 0) {
        args.nodes = payload_.partials + row * node_floats;
        args.node_stride = spec_->num_heads * node_floats;
    }
    // The picks of a range are one node; the other nodes of a tail are empty.
    for (std::int64_t node = 1; spec_->picked_by >= 0 && node < span.num_nodes; ++node) {
        float* const none = args.nodes + node * args.node_stride;
        std::fill_n(none, spec_->group() * node_floats, 0.0f);
        for (std::int64_t i = 0; i < spec_->group(); ++i)
            none[i * node_floats] = -std::numeric_limits<float>::infinity();
    }
    worker_.kernels_.merge(args);
}

/// One past the last token of a piece's split.
std::int64_t AttentionJob::end_of(const Piece& piece) const {
    return std::min(picked_tokens(piece).stored, (piece.unit->split + 1) * kSplitTokens);
}

NextTokens AttentionJob::tokens_of(const Piece& piece) const {
    const PlannedSpan& span = list_->spans[piece.unit->span];
    const std::int64_t split_begin = piece.unit->split * kSplitTokens;
    return {worker_.cache_.view(layer(), piece.head, span.blocks), std::max(span.first_token, split_begin),
            end_of(piece)};
}

/// Prefetches the lines that a new token writes: a row of a key tile, or the whole tile with its last row, and a line
/// or two of values. Otherwise they would be loaded only at the write.
void AttentionJob::prefetch_append(const Piece& piece) const {
    const PlannedSpan& span = list_->spans[piece.unit->span];
    if (!span.stores()) return;
    const std::int64_t position = std::max(span.context_len, piece.unit->split * kSplitTokens);
    if (position >= std::min(span.end, (piece.unit->split + 1) * kSplitTokens)) return;
    const HeadView view = worker_.cache_.view(layer(), piece.head, span.blocks);
    const std::int64_t block_size = worker_.cache_.block_size(), tile = position % block_size / kTileTokens;
    const std::uint8_t* const block = view.base + span.blocks[position / block_size] * view.block_stride_bytes;
    const std::int64_t token = position % kTileTokens, row_bytes = view.key_tile_bytes / kTileTokens;
    const bool fills = token + 1 == kTileTokens;
    prefetch_to_write(block + tile * view.key_tile_bytes + (fills ? 0 : token * row_bytes),
                      fills ? view.key_tile_bytes : row_bytes);
    if (spec_->values_in_keys()) return;
    prefetch_to_write(
        block + view.values_offset_bytes + tile * view.value_tile_bytes + token / 2 * (view.value_tile_bytes / 8),
        view.value_tile_bytes / 8);
}

}  // namespace rworker
