#include "rworker/state_job.hpp"

#include <algorithm>
#include <cstring>

namespace rworker {
namespace {

constexpr std::int64_t kItemsPerThread = 16;  // so that threads end at about the same time
constexpr std::int64_t kRowsPerReading = 3;  // rows of a prompt that take as long as reading and writing the state once
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
    std::int64_t floats = 0, keys = 0, values = 0;
    for (const LayerSpec& layer : cache.layers()) {
        if (!layer.state()) continue;
        const StateSpec& state = *layer.state();
        floats = std::max(floats, state_scratch_floats(state.key_dim, state.value_dim, state.taps));
        keys = std::max(keys, state_shared_floats(state.key_dim, 1));
        values = std::max(values, round_up16(state.value_dim));
    }
    for (Hand& hand : hands_) {
        hand.scratch.resize(floats + kLineFloats);
        for (std::vector<float>& each : hand.lone.keys) each.resize(keys + kLineFloats);
        for (std::vector<float>& each : hand.lone.values) each.resize(values + kLineFloats);
    }
}

void StateJob::plan(std::span<const Span> spans) {
    rows_.clear();
    std::int64_t first = 0;
    for (const Span& span : spans) {
        if (!span.is_stored()) continue;
        const Sequence& of = cache_.sequence(span.sequence_id);
        rows_.push_back({of.state_blocks.data(), first, span.num_rows, of.state_base + span.context_len, of.kept.get(),
                         of.first_kept, of.num_kept, of.coming.get(), span.has_queries(),
                         of.kept_lone && of.num_kept == 1});
        first += span.num_rows;
    }
    reserve_counters();
}

void StateJob::plan(std::int64_t sequence_id, std::int64_t count) {
    const Sequence& of = cache_.sequence(sequence_id);
    const std::int64_t position = of.state_base + of.length - of.num_kept + count;
    rows_ = {{of.state_blocks.data(), 0, 0, position, of.kept.get(), of.first_kept, count, nullptr, false, false}};
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
        if (layer.state()) counters = std::max(counters, rows_.size() * std::size_t(layer.state()->groups));
    if (counters > num_counters_) heads_left_ = std::make_unique<std::atomic<std::int32_t>[]>(num_counters_ = counters);
}

void StateJob::prepare(std::int64_t layer, const Payload& payload) {
    const LayerSpec& of = cache_.layers()[layer];
    spec_ = of.state();
    payload_ = payload;
    std::int64_t most_rows = 0;
    for (const Rows& rows : rows_) most_rows = std::max(most_rows, rows.count + rows.num_kept);
    const std::size_t shared = state_shared_floats(spec_->key_dim, most_rows) + kLineFloats;
    for (Hand& hand : hands_) {
        hand.convolved = {}, hand.next.number = -1;
        hand.lone.convolved = {}, hand.lone.made = -1;
        if (hand.shared.size() < shared) hand.shared.resize(shared);
    }
    const std::int64_t head_bytes = spec_->value_dim * (spec_->key_dim * item_bytes(spec_->dtype) + 4 * (spec_->taps - 1));
    std::int64_t cost = 0;
    for (const Rows& rows : rows_)
        cost += 2 * head_bytes * (1 + (rows.count + rows.num_kept) / kRowsPerReading) * spec_->heads;
    for (std::size_t i = 0; i < rows_.size() * spec_->groups; ++i)
        heads_left_[i].store(std::int32_t(spec_->heads_per_group()), std::memory_order_relaxed);
    const std::int64_t num_rows = std::int64_t(rows_.size());
    heads_per_item_ = find_heads_per_item();
    begin(layer, num_items(), cost, num_rows * spec_->heads * head_bytes);
}

/// Consecutive heads in a thread compute their shared convolution once; enough items remain for all threads.
std::int64_t StateJob::find_heads_per_item() const {
    const std::int64_t of_group = spec_->heads_per_group(), all = std::int64_t(rows_.size()) * spec_->heads;
    for (const std::int64_t count : {4, 3, 2})
        if (spec_->groups && of_group % count == 0 && all / count >= kItemsPerThread * std::int64_t(hands_.size()))
            return count;
    return 1;
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

/// Writes to the window the rows that the state lacked, and the arriving rows unless they may be undone.
void StateJob::keep(const StateChannels& part, const Rows& rows) const {
    if (rows.num_kept) keep(part, kept_of(rows), rows.num_kept, rows.position - rows.num_kept);
    if (!rows.coming) keep(part, payload_of(rows), rows.count, rows.position);
}

/// A copy of a window after the rows that the state lacked, since other heads may still read the window.
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

/// A thread's copies of memory that rows which may be undone must not change.
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

/// Applies the rows that the state lacked, whose outputs are known.
void StateJob::advance_kept(StateArgs args, const Rows& rows) const {
    args.rows = kept_of(rows);
    args.num_rows = args.num_taken = rows.num_kept;
    args.position = rows.position - rows.num_kept;
    args.num_next_reads = 0;
    advance_silently(args);
}

/// Applies rows whose outputs are not needed.
void StateJob::advance_silently(StateArgs args) const {
    thread_local std::vector<float> out;
    out.resize(spec_->value_dim);
    args.out = out.data();
    args.out_stride = 0;
    kernels_.advance(args);
}

/// Returns whether one call applies the rows that the state lacked and the arriving rows, since they are few.
bool StateJob::goes_together(const Rows& rows) const {
    const bool matrix = spec_->kind == StateKind::delta || spec_->kind == StateKind::scan;
    return matrix && (rows.num_kept || rows.coming) && rows.num_kept + rows.count <= kStateBatch;
}

void StateJob::put_together(const Rows& rows, StateArgs& args) const {
    args.earlier = rows.num_kept ? kept_of(rows) : nullptr;
    args.num_earlier = rows.num_kept;
    args.num_rows += rows.num_kept;
    args.num_taken = rows.coming ? rows.num_kept : args.num_rows;
    args.position -= rows.num_kept;
}

/// Applies the rows that the state lacked. Arriving rows use copies of windows, and of the matrix where they may be
/// undone.
void StateJob::set_apart(const Rows& rows, bool computes, const StateArgs& here, Aside& aside, StateArgs& args) const {
    if (rows.num_kept && args.matrix) advance_kept(args, rows);
    if (rows.num_kept && computes) {
        args.value = moved_on(here.value, rows, aside.value, aside.value_rows);
        if (spec_->groups) args.query = moved_on(here.query, rows, aside.query, aside.query_rows);
        if (spec_->groups) args.key = moved_on(here.key, rows, aside.key, aside.key_rows);
    }
    if (rows.coming && args.matrix && computes) set_aside(here.matrix, aside), args.matrix = aside.matrix_rows.data();
}

void StateJob::run(std::int64_t item, std::int64_t next_item, int thread) noexcept {
    const std::int64_t first = item * heads_per_item_, end = first + heads_per_item_;
    const std::int64_t after = next_item < 0 ? -1 : next_item * heads_per_item_;
    for (std::int64_t number = first; number < end; ++number)
        run_head(number, number + 1 < end ? number + 1 : after, thread);
}

void StateJob::run_head(std::int64_t number, std::int64_t next, int thread) {
    const StatePlaces& places = cache_.states();
    const Rows& rows = rows_[number / spec_->heads];
    const std::int64_t head = number % spec_->heads, group = head / spec_->heads_per_group();
    Hand& hand = hands_[thread];
    if (hand.next.number == number)
        std::swap(hand.here, hand.next);
    else
        find(number, hand.here);
    look_ahead(next, hand);
    if (rows.coming && head == 0)
        std::memcpy(rows.coming + places.kept_offset(layer()), payload_of(rows), rows.count * row_bytes());
    is_lone(rows) ? run_lone(number, next, hand) : run_rows(number, hand);
    const std::int64_t key_dim = spec_->key_dim, value_dim = spec_->value_dim;
    keep({spec_->first_value() + head * value_dim, int(value_dim), hand.here.value.data()}, rows);
    if (spec_->groups == 0) return;
    std::atomic<std::int32_t>& left = heads_left_[number / spec_->heads * spec_->groups + group];
    if (left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    keep({spec_->first_query() + group * key_dim, int(key_dim), hand.here.query.data()}, rows);
    keep({spec_->first_key() + group * key_dim, int(key_dim), hand.here.key.data()}, rows);
}

/// Advances a head's state by several rows.
void StateJob::run_rows(std::int64_t number, Hand& hand) const {
    thread_local Aside aside;
    const Rows& rows = rows_[number / spec_->heads];
    find_matrix(hand.here);
    StateArgs args = args_of(rows, hand.here);
    args.next_reads = hand.next_reads.data();
    args.num_next_reads = int(hand.next_reads.size());
    args.scratch = first_line(hand.scratch);
    args.shared = first_line(hand.shared);
    const StateArgs here = args;
    const bool computes = rows.attends || (rows.count && !rows.coming), together = computes && goes_together(rows);
    const bool shareable = together || (computes && !rows.num_kept);
    const Convolved of{number / spec_->heads, number % spec_->heads / spec_->heads_per_group()};
    const Convolved convolved = shareable ? of : Convolved{};
    args.shares = shareable && convolved == hand.convolved;
    hand.convolved = convolved;
    if (together)
        put_together(rows, args);
    else
        set_apart(rows, computes, here, aside, args);
    if (computes) rows.attends ? kernels_.advance(args) : advance_silently(args);
}

/// One row with an output, of `delta` or `scan`. If the next head has one too, its inputs are made meanwhile.
void StateJob::run_lone(std::int64_t number, std::int64_t next, Hand& hand) const {
    const Rows& rows = rows_[number / spec_->heads];
    Lone& lone = hand.lone;
    if (rows.num_kept && !rows.is_pending) {
        find_matrix(hand.here);
        StateArgs kept = args_of(rows, hand.here);
        kept.scratch = first_line(hand.scratch);
        kept.shared = first_line(hand.shared);
        advance_kept(kept, rows);
        hand.convolved = {};
    }
    StateArgs args = lone.made == number ? lone.args : lone_args(number, hand.here, hand);
    args.made = lone.made == number;
    lone.made = -1;
    if (next >= 0 && is_lone(rows_[next / spec_->heads])) {
        lone.args = lone_args(next, hand.next, hand);
        args.next = &lone.args;
        lone.made = next;
    }
    args.next_reads = hand.next_reads.data();
    args.num_next_reads = int(hand.next_reads.size());
    args.num_next_inputs = hand.num_next_inputs;
    kernels_.advance_lone(args);
}

void settle_state(KVCache& cache, const StateKernels& kernels, DType dtype, std::int64_t sequence_id, std::int64_t num_tokens) {
    const Sequence& of = cache.sequence(sequence_id);
    const std::int64_t count = num_tokens - (of.length - of.num_kept);
    if (count == 0) return;
    StateJob job(cache, kernels, dtype, 1);
    job.plan(sequence_id, count);
    for (std::size_t layer = 0; layer < cache.layers().size(); ++layer)
        if (cache.layers()[layer].state()) job.settle(std::int64_t(layer));
    cache.settled(sequence_id, count);
}

}  // namespace rworker
