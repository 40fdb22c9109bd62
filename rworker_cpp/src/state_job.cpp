#include "rworker/state_job.hpp"

#include <algorithm>
#include <cstring>

namespace rworker {
namespace {

constexpr std::int64_t kRowsPerReading = 8;  // a row's arithmetic takes as long as reading an eighth of the state

const void* advanced(const void* data, std::int64_t elements, DType dtype) {
    return static_cast<const std::uint8_t*>(data) + elements * item_bytes(dtype);
}

Recurrence recurrence_of(StateKind kind) {
    constexpr Recurrence kinds[] = {Recurrence::delta, Recurrence::scan, Recurrence::none, Recurrence::selective,
                                    Recurrence::lru};
    return kinds[int(kind)];
}

}  // namespace

const StateKernels& state_kernels([[maybe_unused]] const Kernels& kernels) {
#ifdef RWORKER_AVX512
    if (std::strncmp(kernels.isa, "avx512", 6) == 0) return kAvx512State;
#endif
#ifdef RWORKER_AVX2
    if (std::strcmp(kernels.isa, "scalar") != 0) return kAvx2State;
#endif
#ifdef RWORKER_NEON
    if (std::strcmp(kernels.isa, "scalar") != 0) return kNeonState;
#endif
    return kScalarState;
}

StateJob::StateJob(const KVCache& cache, const StateKernels& kernels, DType dtype, int num_threads)
    : cache_(cache), kernels_(kernels), dtype_(dtype), hands_(num_threads) {
    std::int64_t floats = 0;
    for (const LayerSpec& layer : cache.layers())
        if (layer.state)
            floats = std::max(floats, state_scratch_floats(layer.state->key_dim, layer.state->value_dim, layer.state->taps));
    for (Hand& hand : hands_) hand.scratch.resize(floats);
}

void StateJob::plan(std::span<const Span> spans) {
    rows_.clear();
    std::int64_t first = 0;
    for (const Span& span : spans) {
        const Sequence& of = cache_.sequence(span.sequence_id);
        rows_.push_back({of.state_blocks.data(), first, span.num_rows, span.context_len, of.kept.get(), of.first_kept,
                         of.num_kept, of.coming.get(), span.mode == SpanMode::attend});
        first += span.num_rows;
    }
    reserve_counters();
}

void StateJob::plan(std::int64_t sequence_id, std::int64_t count) {
    const Sequence& of = cache_.sequence(sequence_id);
    const std::int64_t position = of.length - of.num_kept + count;
    rows_ = {{of.state_blocks.data(), 0, 0, position, of.kept.get(), of.first_kept, count, nullptr, false}};
    reserve_counters();
}

void StateJob::settle(std::int64_t layer) {
    for (Rows& rows : rows_) rows.first = rows.count = 0, rows.coming = nullptr, rows.attends = false;
    prepare(layer, {});
    for (std::int64_t item = 0; item < num_items(); ++item) run(item, -1, 0);
}

void StateJob::reserve_counters() {
    std::size_t counters = 0;
    for (const LayerSpec& layer : cache_.layers())
        if (layer.state) counters = std::max(counters, rows_.size() * std::size_t(layer.state->groups));
    if (counters > num_counters_) heads_left_ = std::make_unique<std::atomic<std::int32_t>[]>(num_counters_ = counters);
}

void StateJob::prepare(std::int64_t layer, const Payload& payload) {
    const LayerSpec& of = cache_.layers()[layer];
    spec_ = of.state.get();
    payload_ = payload;
    std::int64_t most_rows = 0;
    for (const Rows& rows : rows_) most_rows = std::max({most_rows, rows.count, rows.num_kept});
    const std::size_t shared = most_rows > 1 ? state_shared_floats(spec_->key_dim, most_rows) : 0;
    for (Hand& hand : hands_) {
        hand.convolved = {}, hand.next.item = -1;
        if (hand.shared.size() < shared) hand.shared.resize(shared);
    }
    const std::int64_t head_bytes = spec_->value_dim * (spec_->key_dim * item_bytes(spec_->dtype) + 4 * (spec_->taps - 1));
    std::int64_t cost = 0;
    for (const Rows& rows : rows_)
        cost += 2 * head_bytes * (1 + (rows.count + rows.num_kept) / kRowsPerReading) * spec_->heads;
    for (std::size_t i = 0; i < rows_.size() * spec_->groups; ++i)
        heads_left_[i].store(std::int32_t(spec_->heads_per_group()), std::memory_order_relaxed);
    const std::int64_t num_rows = std::int64_t(rows_.size());
    begin(layer, num_rows * spec_->heads, cost, num_rows * spec_->heads * head_bytes);
}

/// Finds where the state of an item's head lies.
void StateJob::find(std::int64_t item, Head& head) const {
    const LayerSpec& of = cache_.layers()[layer()];
    const StatePlaces& places = cache_.states();
    const std::int32_t* const blocks = rows_[item / spec_->heads].blocks;
    const std::int64_t index = item % spec_->heads, group = index / spec_->heads_per_group(), earlier = spec_->taps - 1;
    const auto fill = [&](std::vector<float*>& rows, std::int64_t first, std::int64_t count) {
        rows.resize(count);
        cache_.state_rows(blocks, first, rows);
    };
    fill(head.value, places.value_window(of, layer(), index), earlier * places.rows_of(spec_->value_dim));
    if (spec_->groups) {
        fill(head.query, places.query_window(of, layer(), group), earlier * places.rows_of(spec_->key_dim));
        fill(head.key, places.key_window(of, layer(), group), earlier * places.rows_of(spec_->key_dim));
    }
    if (spec_->key_dim) fill(head.matrix, places.matrix(of, layer(), index), spec_->key_dim);
    head.item = item;
}

/// Lists what an item's call will read; filters are near.
void StateJob::look_ahead(std::int64_t item, Hand& hand) const {
    hand.next_reads.clear();
    if (item < 0) return;
    find(item, hand.next);
    const auto add = [&](const void* data, std::int64_t bytes) {
        const auto* const first = static_cast<const std::uint8_t*>(data);
        if (!hand.next_reads.empty() && hand.next_reads.back().first + hand.next_reads.back().bytes == first)
            hand.next_reads.back().bytes += bytes;
        else
            hand.next_reads.push_back({first, bytes});
    };
    const auto add_rows = [&](const std::vector<float*>& rows) {
        for (const float* const row : rows) add(row, 4 * cache_.states().row_floats());
    };
    const auto add_part = [&](std::int64_t channel, std::int64_t dim, const std::vector<float*>& window) {
        add_rows(window);
        add(advanced(payload_of(rows_[item / spec_->heads]), channel, dtype_), dim * item_bytes(dtype_));
    };
    const std::int64_t index = item % spec_->heads, group = index / spec_->heads_per_group(), key_dim = spec_->key_dim;
    add_part(spec_->first_value() + index * spec_->value_dim, spec_->value_dim, hand.next.value);
    if (spec_->groups && index % spec_->heads_per_group() == 0) {
        add_part(spec_->first_query() + group * key_dim, key_dim, hand.next.query);
        add_part(spec_->first_key() + group * key_dim, key_dim, hand.next.key);
    }
    add_rows(hand.next.matrix);
}

const void* StateJob::payload_of(const Rows& rows) const {
    return advanced(payload_.keys, rows.first * spec_->row_elements(item_bytes(dtype_)), dtype_);
}

const void* StateJob::kept_of(const Rows& rows) const {
    return rows.kept + cache_.states().kept_offset(layer()) + rows.first_kept * row_bytes();
}

void StateJob::keep(const StateChannels& part, const void* payload, std::int64_t count, std::int64_t position) const {
    kernels_.keep({dtype_, payload, spec_->row_elements(item_bytes(dtype_)), count, position, part, int(spec_->taps),
                   int(cache_.states().row_floats())});
}

/// Of what is written for good: the rows that the state lacked, and those that come unless they may be taken back.
void StateJob::keep(const StateChannels& part, const Rows& rows) const {
    if (rows.num_kept) keep(part, kept_of(rows), rows.num_kept, rows.position - rows.num_kept);
    if (!rows.coming) keep(part, payload_of(rows), rows.count, rows.position);
}

/// A copy of a window, as it is after the rows that the state lacked; other heads may still read the window.
StateChannels StateJob::moved_on(const StateChannels& part, const Rows& rows, std::vector<float>& floats,
                                 std::vector<float*>& pointers) const {
    const std::int64_t wide = cache_.states().row_floats(), count = (spec_->taps - 1) * cache_.states().rows_of(part.dim);
    floats.resize(count * wide);
    pointers.resize(count);
    for (std::int64_t i = 0; i < count; ++i) {
        pointers[i] = floats.data() + i * wide;
        std::copy_n(part.window[i], wide, pointers[i]);
    }
    const StateChannels copy{part.first_channel, part.dim, pointers.data()};
    keep(copy, kept_of(rows), rows.num_kept, rows.position - rows.num_kept);
    return copy;
}

/// A thread's copies of what rows that may be taken back must not change.
struct StateJob::Aside {
    std::vector<float> query, key, value, matrix;
    std::vector<float*> query_rows, key_rows, value_rows, matrix_rows;
};

void StateJob::set_aside(float* const* matrix, Aside& aside) const {
    const std::int64_t wide = cache_.states().row_floats();
    aside.matrix.resize(spec_->key_dim * wide);
    aside.matrix_rows.resize(spec_->key_dim);
    for (std::int64_t i = 0; i < spec_->key_dim; ++i) {
        aside.matrix_rows[i] = aside.matrix.data() + i * wide;
        std::copy_n(matrix[i], wide, aside.matrix_rows[i]);
    }
}

/// Take the rows that the state lacked, whose outputs are known.
void StateJob::advance_kept(StateArgs args, const Rows& rows) const {
    args.rows = kept_of(rows);
    args.num_rows = rows.num_kept;
    args.position = rows.position - rows.num_kept;
    args.num_next_reads = 0;
    advance_silently(args);
}

/// Take rows whose outputs are not wanted.
void StateJob::advance_silently(StateArgs args) const {
    thread_local std::vector<float> out;
    out.resize(spec_->value_dim);
    args.out = out.data();
    args.out_stride = 0;
    kernels_.advance(args);
}

/// What is the same for all tokens of a head, which lies where `at` says; without what a thread has at hand.
StateArgs StateJob::args_of(const Rows& rows, const Head& at) const {
    const StateSpec& spec = *spec_;
    const std::int64_t head = at.item % spec.heads, group = head / spec.heads_per_group(), dim = spec.value_dim;
    const std::int64_t numbers = spec.channels() * item_bytes(dtype_);
    const auto part = [](std::int64_t first, std::int64_t width, const std::vector<float*>& window) {
        return StateChannels{first, int(width), window.data()};
    };
    StateArgs args{};
    args.dtype = dtype_;
    args.rows = payload_of(rows);
    args.row_stride = spec.row_elements(item_bytes(dtype_));
    args.num_rows = rows.count;
    args.position = rows.position;
    args.value = part(spec.first_value() + head * dim, dim, at.value);
    if (spec.groups) args.query = part(spec.first_query() + group * spec.key_dim, spec.key_dim, at.query);
    if (spec.groups) args.key = part(spec.first_key() + group * spec.key_dim, spec.key_dim, at.key);
    args.filters = spec.filters.data();
    args.bias = spec.bias.data();
    args.channels = spec.channels();
    args.taps = int(spec.taps);
    args.silu = spec.silu;
    args.recurrence = recurrence_of(spec.kind);
    args.norm = spec.norm;
    args.first_decay = numbers + 4 * head * (spec.by_channel() ? dim : spec.decays);
    args.first_rate = numbers + 4 * (spec.heads * spec.decays + head);
    args.decays = int(spec.decays);
    args.factors = spec.factors.data() + head * dim;
    args.factor_stride = spec.heads * dim;
    args.scale = spec.scale;
    args.skip = spec.skip.empty() ? 0.0f : spec.skip[head];
    args.matrix = spec.key_dim ? at.matrix.data() : nullptr;
    args.row_floats = int(cache_.states().row_floats());
    args.state_dtype = spec.dtype;
    if (rows.attends)
        args.out = const_cast<void*>(advanced(payload_.out, (rows.first * spec.heads + head) * dim, dtype_));
    args.out_stride = spec.heads * dim;
    return args;
}

void StateJob::run(std::int64_t item, std::int64_t next_item, int thread) noexcept {
    thread_local Aside aside;
    const StateSpec& spec = *spec_;
    const StatePlaces& places = cache_.states();
    const Rows& rows = rows_[item / spec.heads];
    const std::int64_t head = item % spec.heads, group = head / spec.heads_per_group();
    Hand& hand = hands_[thread];
    if (hand.next.item == item)
        std::swap(hand.here, hand.next);
    else
        find(item, hand.here);
    look_ahead(next_item, hand);
    StateArgs args = args_of(rows, hand.here);
    args.next_reads = hand.next_reads.data();
    args.num_next_reads = int(hand.next_reads.size());
    args.scratch = hand.scratch.data();
    args.shared = hand.shared.data();
    const StateArgs here = args;
    const bool computes = rows.attends || (rows.count && !rows.coming);
    const bool shareable = computes && !rows.num_kept;
    const Convolved convolved = shareable ? Convolved{item / spec.heads, group} : Convolved{};
    args.shares = shareable && convolved == hand.convolved;
    hand.convolved = convolved;
    if (rows.num_kept && args.matrix) advance_kept(args, rows);
    if (rows.num_kept && computes) {
        args.value = moved_on(here.value, rows, aside.value, aside.value_rows);
        if (spec.groups) args.query = moved_on(here.query, rows, aside.query, aside.query_rows);
        if (spec.groups) args.key = moved_on(here.key, rows, aside.key, aside.key_rows);
    }
    if (rows.coming) {
        if (head == 0)
            std::memcpy(rows.coming + places.kept_offset(layer()), payload_of(rows), rows.count * row_bytes());
        if (args.matrix && computes) set_aside(here.matrix, aside), args.matrix = aside.matrix_rows.data();
    }
    if (computes) rows.attends ? kernels_.advance(args) : advance_silently(args);
    keep(here.value, rows);
    if (spec.groups == 0) return;
    std::atomic<std::int32_t>& left = heads_left_[item / spec.heads * spec.groups + group];
    if (left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    keep(here.query, rows);
    keep(here.key, rows);
}

void settle_state(KVCache& cache, const StateKernels& kernels, DType dtype, std::int64_t sequence_id, std::int64_t num_tokens) {
    const Sequence& of = cache.sequence(sequence_id);
    const std::int64_t count = num_tokens - (of.length - of.num_kept);
    if (count == 0) return;
    StateJob job(cache, kernels, dtype, 1);
    job.plan(sequence_id, count);
    for (std::size_t layer = 0; layer < cache.layers().size(); ++layer)
        if (cache.layers()[layer].state) job.settle(std::int64_t(layer));
    cache.settled(sequence_id, count);
}

}  // namespace rworker
