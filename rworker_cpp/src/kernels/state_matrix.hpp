// A head's matrix and one token of it, over any Lanes.
#pragma once

#include "kernels/state_inputs.hpp"

namespace {

/// sum += S'x over columns [first, first + N vectors). Rows go in pairs, each with sums of its own, or one would wait
/// for the other.
template <class L, DType D, int N>
[[gnu::always_inline]] inline void add_products(const StateArgs& args, int first, const float* x, typename L::vec (&sum)[N],
                                                int lines, Ahead& ahead) {
    using vec = typename L::vec;
    const int dim = args.key.dim;
    float* const* const rows = args.matrix;
    vec odd[N];
    for (int n = 0; n < N; ++n) odd[n] = L::set1(0.0f);
    int i = 0;
    for (; i + 2 <= dim; i += 2) {
        const void *const row = rows[i], *const other = rows[i + 1];
        ahead.ask(2 * lines);
        const vec here = L::set1(x[i]), there = L::set1(x[i + 1]);
        RWORKER_UNROLL
        for (int n = 0; n < N; ++n) {
            sum[n] = L::fma(here, widen<L, D>(row, first + n * L::width), sum[n]);
            odd[n] = L::fma(there, widen<L, D>(other, first + n * L::width), odd[n]);
        }
    }
    if (i < dim)
        for (int n = 0; n < N; ++n)
            sum[n] = L::fma(L::set1(x[i]), widen<L, D>(args.matrix[i], first + n * L::width), sum[n]);
    for (int n = 0; n < N; ++n) sum[n] = L::add(sum[n], odd[n]);
}

/// What one token does to columns [first, first + N vectors) of a matrix; `o` and `v` have round_up16(value_dim).
/// delta reads the rows twice, the second time from a near cache.
template <class L, DType D, int N, bool Delta>
[[gnu::always_inline]] inline void update(const StateArgs& args, int first, const float* q, const float* k, const float* a,
                                          const float* ak, float rate, const float* v, float* o, Ahead& asked) {
    using vec = typename L::vec;
    constexpr int kBytes = N * L::width * int(item_bytes(D)), kLines = kBytes > 64 ? kBytes / 64 : 1;
    constexpr int kFirst = Delta ? kLines / 2 : 0;
    vec d[N], sum[N];
    Ahead ahead = asked;
    for (int n = 0; n < N; ++n) d[n] = L::load(v + first + n * L::width), sum[n] = L::set1(0.0f);
    if constexpr (Delta) {
        add_products<L, D, N>(args, first, ak, sum, kFirst, ahead);
        for (int n = 0; n < N; ++n) d[n] = L::sub(d[n], sum[n]), sum[n] = L::set1(0.0f);
    }
    alignas(64) float taken[N * L::width];
    for (int n = 0; n < N; ++n) L::store(taken + n * L::width, L::mul(d[n], L::set1(rate)));
    const int dim = args.key.dim;
    float* const* const rows = args.matrix;
    for (int i = 0; i < dim; ++i) {
        void* const row = rows[i];
        ahead.ask(kLines - kFirst);
        const vec key = L::set1(k[i]), decay = L::set1(a[i]), query = L::set1(q[i]);
        RWORKER_UNROLL
        for (int n = 0; n < N; ++n) {
            const vec s = L::fma(key, L::load(taken + n * L::width), L::mul(decay, widen<L, D>(row, first + n * L::width)));
            narrow<L, D>(s, row, first + n * L::width);
            sum[n] = L::fma(query, s, sum[n]);
        }
    }
    for (int n = 0; n < N; ++n) L::store(o + first + n * L::width, sum[n]);
    asked = ahead;
}

/// Decays of a token, [key_dim], their logs as they lie in its numbers.
template <class L>
void read_decays(const StateArgs& args, const uint8_t* numbers, int dim16, float* a) {
    if (args.decays == 1) {
        const float decay = exp_of_nonpositive<L>(number_at(numbers + args.first_decay));
        for (int i = 0; i < dim16; ++i) a[i] = decay;
        return;
    }
    widen_row<L>(DType::float32, numbers + args.first_decay, args.decays, 1.0f, a);
    for (int i = 0; i < dim16; i += L::width) L::store(a + i, exp_nonpositive_one<L>(L::load(a + i)));
}

/// o += skip v.
template <class L>
void add_skip(const StateArgs& args, int dim16, const float* v, float* o) {
    if (args.skip == 0.0f) return;
    for (int i = 0; i < dim16; i += L::width)
        L::store(o + i, L::fma(L::set1(args.skip), L::load(v + i), L::load(o + i)));
}

/// `delta` and `scan`, one token. Where the group's query and key are those of the call before, they still lie in the scratch.
template <class L, DType D, bool Delta>
void advance_by_one(const StateArgs& args, const Convolved<L>& value, float* o, float* scratch, Ahead& ahead) {
    const Convolved<L> query(args, args.query, ahead, scratch, args.shares), key(args, args.key, ahead, scratch, args.shares);
    float *const a = scratch, *const ak = a + key.dim16;
    const int dim = args.key.dim;
    begin_matrix<L>(args, dim);
    constexpr int kMost = Delta && L::width == 8 ? 4 : 8;  // delta's first pass has two sums of each, which are to fit the registers
    value.take(0);
    if (!args.shares) {
        query.take(0), key.take(0);
        query.scale_by(args.scale, args.norm), key.scale_by(1.0f, args.norm);
    }
    const uint8_t* const numbers = row_of(args, 0);
    read_decays<L>(args, numbers, key.dim16, a);
    for (int i = 0; i < dim; ++i) ak[i] = a[i] * key.out[i];
    const float rate = number_at(numbers + args.first_rate);
    int first = 0;
    const auto go_on = [&]<int N>() {
        for (; first + N * L::width <= value.dim16; first += N * L::width)
            update<L, D, N, Delta>(args, first, query.out, key.out, a, ak, rate, value.out, o, ahead);
    };
    go_on.template operator()<kMost>();
    if constexpr (kMost > 4) go_on.template operator()<4>();
    go_on.template operator()<2>();
    go_on.template operator()<1>();
    add_skip<L>(args, value.dim16, value.out, o);
    write_outputs<L>(args, 0, o);
}

}  // namespace
