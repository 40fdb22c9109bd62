// Where the state of a head lies, what is read of it next, and what a kernel is told.
#include "rworker/state_job.hpp"

namespace rworker {
namespace {

Recurrence recurrence_of(StateKind kind) {
    constexpr Recurrence kinds[] = {Recurrence::delta, Recurrence::scan, Recurrence::none, Recurrence::selective,
                                    Recurrence::lru};
    return kinds[int(kind)];
}

}  // namespace

/// Finds where the state of a head lies.
void StateJob::find(std::int64_t number, Head& head) const {
    const LayerSpec& of = cache_.layers()[layer()];
    const StatePlaces& places = cache_.states();
    const std::int32_t* const blocks = rows_[number / spec_->heads].blocks;
    const std::int64_t index = number % spec_->heads, group = index / spec_->heads_per_group(), earlier = spec_->taps - 1;
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
    head.number = number;
}

/// Lists what a head's call will read; filters are near.
void StateJob::look_ahead(std::int64_t number, Hand& hand) const {
    hand.next_reads.clear();
    if (number < 0) return;
    find(number, hand.next);
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
        add(advanced(payload_of(rows_[number / spec_->heads]), channel, dtype_), dim * item_bytes(dtype_));
    };
    const std::int64_t index = number % spec_->heads, group = index / spec_->heads_per_group(), key_dim = spec_->key_dim;
    add_part(spec_->first_value() + index * spec_->value_dim, spec_->value_dim, hand.next.value);
    if (spec_->groups && index % spec_->heads_per_group() == 0) {
        add_part(spec_->first_query() + group * key_dim, key_dim, hand.next.query);
        add_part(spec_->first_key() + group * key_dim, key_dim, hand.next.key);
    }
    add_rows(hand.next.matrix);
}

/// What is the same for all tokens of a head, which lies where `at` says; without what a thread has at hand.
StateArgs StateJob::args_of(const Rows& rows, const Head& at) const {
    const StateSpec& spec = *spec_;
    const std::int64_t head = at.number % spec.heads, group = head / spec.heads_per_group(), dim = spec.value_dim;
    const std::int64_t numbers = spec.channels() * item_bytes(dtype_);
    const auto part = [](std::int64_t first, std::int64_t width, const std::vector<float*>& window) {
        return StateChannels{first, int(width), window.data()};
    };
    StateArgs args{};
    args.dtype = dtype_;
    args.rows = payload_of(rows);
    args.row_stride = spec.row_elements(item_bytes(dtype_));
    args.num_rows = args.num_taken = rows.count;
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

}  // namespace rworker
