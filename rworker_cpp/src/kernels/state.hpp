// Recurrent layers over any Lanes: how a head's state and its window are updated.
#pragma once

#include "kernels/state_lone.hpp"
#include "kernels/state_tokens.hpp"

namespace {

using rworker::Recurrence;
using rworker::WindowArgs;

/// `lru`: one row, whose numbers are the decays.
template <class L, DType D>
void advance_lru(const StateArgs& args, const Convolved<L>& value, float* o, float* decays) {
    begin_matrix<L>(args, 1);
    void* const state = args.matrix[0];
    for (int64_t row = 0; row < args.num_rows; ++row) {
        value.take(row);
        widen_row<L>(DType::float32, row_of(args, row) + args.first_decay, args.value.dim, 1.0f, decays);
        for (int c = 0; c < value.dim16; c += L::width) {
            const typename L::vec s = L::fma(L::load(decays + c), widen<L, D>(state, c), L::load(value.out + c));
            narrow<L, D>(s, state, c);
            L::store(o + c, s);
        }
        write_outputs<L>(args, row, o);
    }
}

/// `selective`: the key_dim elements of each channel, one below the other.
template <class L, DType D>
void advance_selective(const StateArgs& args, const Convolved<L>& value, float* o, float* scratch, Ahead& ahead) {
    using vec = typename L::vec;
    const Convolved<L> query(args, args.query, ahead, scratch), key(args, args.key, ahead, scratch);
    float* const steps = scratch;
    const int key_dim = args.key.dim;
    begin_matrix<L>(args, key_dim);
    for (int64_t row = 0; row < args.num_rows; ++row) {
        value.take(row), query.take(row), key.take(row);
        widen_row<L>(DType::float32, row_of(args, row) + args.first_decay, args.value.dim, 1.0f, steps);
        if (row + 1 == args.num_rows) ahead.begin();
        for (int c = 0; c < value.dim16; c += L::width) {
            const vec step = L::load(steps + c), taken = L::mul(step, L::load(value.out + c));
            vec sum = L::set1(0.0f);
            for (int n = 0; n < key_dim; ++n) {
                if (c % 16 == 0) ahead.ask(1);
                const vec decay = exp_nonpositive_one<L>(L::mul(step, L::load(args.factors + n * args.factor_stride + c)));
                const vec s = L::fma(L::set1(key.out[n]), taken, L::mul(decay, widen<L, D>(args.matrix[n], c)));
                narrow<L, D>(s, args.matrix[n], c);
                sum = L::fma(L::set1(query.out[n]), s, sum);
            }
            L::store(o + c, sum);
        }
        write_outputs<L>(args, row, o);
    }
}

template <class L, DType D>
void advance_state(const StateArgs& args, const Convolved<L>& value, float* o, float* scratch, Ahead& ahead) {
    if (args.recurrence == Recurrence::delta) return advance_by_many<L, D, true>(args, value, scratch, ahead);
    if (args.recurrence == Recurrence::scan) return advance_by_many<L, D, false>(args, value, scratch, ahead);
    if (args.recurrence == Recurrence::selective) return advance_selective<L, D>(args, value, o, scratch, ahead);
    advance_lru<L, D>(args, value, o, scratch);
}

template <class L>
void advance(const StateArgs& args) {
    float* scratch = args.scratch;
    Ahead ahead(args);
    const Convolved<L> value(args, args.value, ahead, scratch);
    float* const o = scratch;
    scratch += value.dim16;
    if (args.recurrence != Recurrence::none)
        return with_dtype(args.state_dtype, [&]<DType D>() { advance_state<L, D>(args, value, o, scratch, ahead); });
    for (int64_t row = 0; row < args.num_rows; ++row) {
        value.take(row);
        write_outputs<L>(args, row, value.out);
    }
}

template <class L>
void keep(const WindowArgs& args) {
    const int taps = args.taps - 1, rows_of = (args.channels.dim + args.row_floats - 1) / args.row_floats;
    const int64_t kept = args.num_rows < taps ? args.num_rows : taps;
    for (int64_t row = args.num_rows - kept; row < args.num_rows; ++row)
        for (int i = 0; i < rows_of; ++i) {
            const int first = i * args.row_floats, left = args.channels.dim - first;
            widen_row<L>(args.dtype,
                         element(args.dtype, args.rows, row * args.row_stride + args.channels.first_channel + first),
                         left < args.row_floats ? left : args.row_floats, 1.0f,
                         args.channels.window[(args.position + row) % taps * rows_of + i]);
        }
}

template <class L>
constexpr rworker::StateKernels make_state_kernels() {
    return {advance<L>, advance_lone<L>, keep<L>};
}

}  // namespace
