// Where the state of a head lies, what is read of it next, and the arguments of its kernel.
#include "rworker/state_job.hpp"

namespace rworker {
namespace {

void add(std::vector<Stretch>& stretches, const void* data, std::int64_t bytes) {
    const auto* const first = static_cast<const std::uint8_t*>(data);
    if (!stretches.empty() && stretches.back().first + stretches.back().bytes == first)
        stretches.back().bytes += bytes;
    else
        stretches.push_back({first, bytes});
}

Recurrence recurrence_of(StateKind kind) {
    constexpr Recurrence kinds[] = {Recurrence::delta, Recurrence::scan, Recurrence::none, Recurrence::selective,
                                    Recurrence::lru};
    return kinds[int(kind)];
}

}  // namespace

/// Sets `rows`, if given, to the addresses of `count` rows of a state, and `pieces` to their stretches of memory.
void StateJob::find_rows(const std::int32_t* blocks, std::int64_t first, std::int64_t count, std::vector<float*>* rows,
                         std::vector<Stretch>& pieces) const {
    const std::int64_t wide = cache_.states().row_floats();
    if (rows) rows->clear();
    cache_.state_pieces(blocks, first, count, [&](float* row, std::int64_t length) {
        for (std::int64_t i = 0; rows && i < length; ++i) rows->push_back(row + i * wide);
        add(pieces, row, 4 * wide * length);
    });
}

/// Finds where the state of a head lies, except for the rows of its matrix.
void StateJob::find(std::int64_t number, Head& head) const {
    const LayerSpec& of = cache_.layers()[layer()];
    const StatePlaces& places = cache_.states();
    const std::int32_t* const blocks = rows_[number / spec_->heads].blocks;
    const std::int64_t index = number % spec_->heads, group = index / spec_->heads_per_group(), earlier = spec_->taps - 1;
    const std::int64_t values = earlier * places.rows_of(spec_->value_dim), keys = earlier * places.rows_of(spec_->key_dim);
    head.number = number;
    head.value_window.clear(), head.other_windows.clear(), head.pieces.clear();
    find_rows(blocks, places.value_window(of, layer(), index), values, &head.value, head.value_window);
    if (spec_->groups) {
        find_rows(blocks, places.query_window(of, layer(), group), keys, &head.query, head.other_windows);
        find_rows(blocks, places.key_window(of, layer(), group), keys, &head.key, head.other_windows);
    }
    if (spec_->key_dim) find_rows(blocks, places.matrix(of, layer(), index), spec_->key_dim, nullptr, head.pieces);
}

void StateJob::find_matrix(Head& head) const {
    const std::int64_t wide = cache_.states().row_floats();
    head.matrix.clear();
    for (const Stretch& piece : head.pieces)
        for (std::int64_t i = 0; i < piece.bytes; i += 4 * wide)
            head.matrix.push_back(reinterpret_cast<float*>(const_cast<std::uint8_t*>(piece.first) + i));
}

/// Lists what a head's call reads, its inputs first; filters are in the cache already.
void StateJob::look_ahead(std::int64_t number, Hand& hand) const {
    hand.next_reads.clear();
    hand.num_next_inputs = 0;
    if (number < 0) return;
    find(number, hand.next);
    const Head& head = hand.next;
    std::vector<Stretch>& reads = hand.next_reads;
    const Rows& rows = rows_[number / spec_->heads];
    const auto add_all = [&](const std::vector<Stretch>& some) { reads.insert(reads.end(), some.begin(), some.end()); };
    const auto add_inputs = [&](std::int64_t channel, std::int64_t dim) {
        add(reads, advanced(payload_of(rows), channel, dtype_), dim * item_bytes(dtype_));
        if (rows.num_kept) add(reads, advanced(kept_of(rows), channel, dtype_), dim * item_bytes(dtype_));
    };
    const std::int64_t index = number % spec_->heads, group = index / spec_->heads_per_group(), key_dim = spec_->key_dim;
    add_all(head.value_window);
    add_inputs(spec_->first_value() + index * spec_->value_dim, spec_->value_dim);
    StateArgs pending{};
    if (is_lone(rows)) add_pending(rows, index, pending);
    if (pending.earlier_taken) add(reads, pending.earlier_taken, 4 * spec_->value_dim);
    if (spec_->groups && index % spec_->heads_per_group() == 0) {
        add_all(head.other_windows);
        add_inputs(spec_->first_query() + group * key_dim, key_dim);
        add_inputs(spec_->first_key() + group * key_dim, key_dim);
        if (pending.earlier_key) add(reads, pending.earlier_key, 4 * key_dim);
    }
    hand.num_next_inputs = int(reads.size());
    add_all(head.pieces);
}

/// Sets the key and matrix input that the previous row left, and where this row leaves its own.
void StateJob::add_pending(const Rows& rows, std::int64_t head, StateArgs& args) const {
    const std::int64_t group = head / spec_->heads_per_group(), place = cache_.states().pending_offset(layer());
    const std::int64_t key16 = round_up16(spec_->key_dim), value16 = round_up16(spec_->value_dim);
    const std::int64_t key = place + 4 * group * key16, taken = place + 4 * (spec_->groups * key16 + head * value16);
    if (rows.is_pending) {
        args.earlier_key = reinterpret_cast<const float*>(rows.kept + key);
        args.earlier_taken = reinterpret_cast<const float*>(rows.kept + taken);
    }
    if (!rows.coming) return;
    args.coming_taken = reinterpret_cast<float*>(rows.coming + taken);
    if (head % spec_->heads_per_group() == 0) args.coming_key = reinterpret_cast<float*>(rows.coming + key);
}

/// Returns the arguments for a single row. Its inputs use another buffer than the previous head's.
StateArgs StateJob::lone_args(std::int64_t number, const Head& at, Hand& hand) const {
    const Rows& rows = rows_[number / spec_->heads];
    const std::int64_t head = number % spec_->heads;
    Lone& lone = hand.lone;
    StateArgs args = args_of(rows, at);
    args.earlier = rows.num_kept ? kept_of(rows) : nullptr;
    args.num_earlier = rows.num_kept;
    args.num_rows += rows.num_kept;
    args.position -= rows.num_kept;
    const Convolved convolved{number / spec_->heads, head / spec_->heads_per_group()};
    args.shares = convolved == lone.convolved;
    if (!args.shares) lone.key ^= 1;
    lone.convolved = convolved;
    lone.value ^= 1;
    args.shared = first_line(lone.keys[lone.key]);
    args.values = first_line(lone.values[lone.value]);
    args.scratch = first_line(hand.scratch);
    add_pending(rows, head, args);
    return args;
}

/// Sets the arguments that are the same for all tokens of a head, which lies at `at`, except a thread's buffers.
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
    args.pieces = at.pieces.data();
    args.row_floats = int(cache_.states().row_floats());
    args.state_dtype = spec.dtype;
    if (rows.attends)
        args.out = const_cast<void*>(advanced(payload_.out, (rows.first * spec.heads + head) * dim, dtype_));
    args.out_stride = spec.heads * dim;
    return args;
}

}  // namespace rworker
