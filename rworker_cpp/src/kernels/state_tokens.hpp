// A head's matrix and several tokens, over any Lanes. One strip of columns at a time stays in the processor's cache
// while all tokens of a batch are applied. Each column has its operations in the order of state_lone.hpp, so it has the
// same bits.
#pragma once

#include "kernels/state_matrix.hpp"

namespace {

/// A token's numbers: query, key, decays, decays x key and x query [key_dim], values and outputs [value_dim]; q'k of delta.
struct Token {
    const float *q, *k, *a, *ak, *aq, *v;
    float rate, qk;
    float* o;
};

/// Rows of a strip: in the matrix, or one below the other.
struct Scattered {
    float* const* rows;
    int64_t offset;
    void* operator[](int i) const { return reinterpret_cast<uint8_t*>(rows[i]) + offset; }
};
struct Stacked {
    uint8_t* first;
    int64_t bytes;
    void* operator[](int i) const { return first + i * bytes; }
};

/// N vectors of columns of a matrix, and what the next token needs of them: delta's S'(ak) and S'(aq).
template <class L, DType D, int N, bool Delta>
struct Strip {
    using vec = typename L::vec;
    static constexpr int kBytes = N * L::width * int(item_bytes(D));
    const int dim, first;

    Strip(int rows, int column) : dim(rows), first(column) {}
    vec sum[N], read[N];

    /// Copies the rows, and computes the sums for the first token.
    [[gnu::always_inline]] void lift(Scattered from, Stacked to, const Token& next, Ahead& asked) {
        Ahead ahead = asked;
        for (int n = 0; n < N; ++n) sum[n] = read[n] = L::set1(0.0f);
        for (int i = 0; i < dim; ++i) {
            ahead.ask(1);
            RWORKER_UNROLL
            for (int n = 0; n < N; ++n) {
                const vec s = widen<L, D>(from[i], n * L::width);
                narrow<L, D>(s, to[i], n * L::width);
                if constexpr (Delta) add(next, i, n, s);
            }
        }
        asked = ahead;
    }

    /// Applies a token, and computes the sums for the `next` one.
    template <class From, class To>
    [[gnu::always_inline]] void take(const Token& token, const Token& next, From from, To to, Ahead& asked) {
        vec taken[N], out[N];
        for (int n = 0; n < N; ++n) {
            vec d = L::load(token.v + first + n * L::width);
            if constexpr (Delta) d = L::sub(d, sum[n]);
            taken[n] = L::mul(d, L::set1(token.rate));
            out[n] = L::set1(0.0f);
            if constexpr (Delta) out[n] = L::fma(L::set1(token.qk), taken[n], read[n]), sum[n] = read[n] = L::set1(0.0f);
        }
        Ahead ahead = asked;
        for (int i = 0; i < dim; ++i) {
            ahead.ask(1);
            const vec key = L::set1(token.k[i]), decay = L::set1(token.a[i]);
            RWORKER_UNROLL
            for (int n = 0; n < N; ++n) {
                const vec s = L::fma(key, taken[n], L::mul(decay, widen<L, D>(from[i], n * L::width)));
                narrow<L, D>(s, to[i], n * L::width);
                if constexpr (Delta && D == DType::float32) add(next, i, n, s);
                if constexpr (Delta && D != DType::float32) add(next, i, n, widen<L, D>(to[i], n * L::width));
                if constexpr (!Delta) out[n] = L::fma(L::set1(token.q[i]), s, out[n]);
            }
        }
        for (int n = 0; n < N; ++n) L::store(token.o + first + n * L::width, out[n]);
        asked = ahead;
    }

  private:
    [[gnu::always_inline]] void add(const Token& next, int i, int n, vec s) {
        sum[n] = L::fma(L::set1(next.ak[i]), s, sum[n]);
        read[n] = L::fma(L::set1(next.aq[i]), s, read[n]);
    }
};

/// Applies `count` tokens to N vectors of columns; the matrix keeps the result of the first `num_taken`. `near` has
/// room for a strip.
template <class L, DType D, int N, bool Delta>
void take_all(const StateArgs& args, int first, const Token* tokens, int count, int num_taken, float* near, Ahead& ahead) {
    using Columns = Strip<L, D, N, Delta>;
    const Scattered far{args.matrix, first * item_bytes(D)};
    const Stacked stack{reinterpret_cast<uint8_t*>(near), Columns::kBytes};
    Columns columns(args.key.dim, first);
    columns.lift(far, stack, tokens[0], ahead);
    for (int t = 0; t < count; ++t) {
        const Token& after = tokens[t + 1 < count ? t + 1 : t];
        if (t + 1 == num_taken)
            columns.take(tokens[t], after, stack, far, ahead);
        else if (t == num_taken && t > 0)
            columns.take(tokens[t], after, far, stack, ahead);
        else
            columns.take(tokens[t], after, stack, stack, ahead);
    }
}

/// Convolves queries and keys of all rows, once for consecutive heads of a group in a thread.
template <class L>
void convolve_shared(const StateArgs& args, float*& scratch, Ahead& ahead) {
    const Convolved<L> query(args, args.query, ahead, scratch), key(args, args.key, ahead, scratch);
    for (int64_t row = 0; row < args.num_rows; ++row) {
        float *const q = args.shared + row * 2 * key.dim16, *const k = q + key.dim16;
        query.take(row, q), key.take(row, k);
        scale_row<L>(args.scale, args.norm, q, key.dim16), scale_row<L>(1.0f, args.norm, k, key.dim16);
    }
}

/// `delta` and `scan` with several tokens.
template <class L, DType D, bool Delta>
void advance_by_many(const StateArgs& args, const Convolved<L>& value, float* scratch, Ahead& ahead) {
    constexpr int kWide = L::width >= 8 ? 2 : 4;
    const int key16 = round_up16(args.key.dim), value16 = value.dim16;
    begin_matrix<L>(args, args.key.dim);
    if (args.num_rows <= rworker::kStateBatch) ahead.begin();
    if (!args.shares) convolve_shared<L>(args, scratch, ahead);
    float *const near = scratch, *numbers = near + args.key.dim * kWide * L::width;
    Token tokens[rworker::kStateBatch];
    for (Token& token : tokens) {
        token.a = numbers, token.ak = token.a + key16, token.aq = token.ak + key16, token.v = token.aq + key16;
        token.o = numbers + 3 * key16 + value16;
        numbers += 3 * key16 + 2 * value16;
    }
    for (int64_t begin = 0; begin < args.num_rows; begin += rworker::kStateBatch) {
        const int64_t left = args.num_rows - begin;
        if (left <= rworker::kStateBatch) ahead.begin();
        const int count = left < rworker::kStateBatch ? int(left) : rworker::kStateBatch;
        const int taken = args.num_taken < args.num_rows ? int(args.num_taken) : count;
        for (int t = 0; t < count; ++t) {
            Token& token = tokens[t];
            float *const a = const_cast<float*>(token.a), *const ak = const_cast<float*>(token.ak),
                         *const aq = const_cast<float*>(token.aq);
            token.q = args.shared + (begin + t) * 2 * key16, token.k = token.q + key16;
            value.take(begin + t, const_cast<float*>(token.v));
            const uint8_t* const said = row_of(args, begin + t);
            read_decays<L>(args, said, key16, a);
            for (int i = 0; i < key16; ++i) ak[i] = a[i] * token.k[i], aq[i] = a[i] * token.q[i];
            token.qk = Delta ? dot<L>(token.q, token.k, key16) : 0.0f;
            token.rate = number_at(said + args.first_rate);
        }
        int first = 0;
        for (; first + kWide * L::width <= value16; first += kWide * L::width)
            take_all<L, D, kWide, Delta>(args, first, tokens, count, taken, near, ahead);
        for (; first < value16; first += L::width) take_all<L, D, 1, Delta>(args, first, tokens, count, taken, near, ahead);
        for (int t = 0; t < count; ++t) {
            add_skip<L>(args, value16, tokens[t].v, tokens[t].o);
            write_outputs<L>(args, begin + t, tokens[t].o);
        }
    }
}

}  // namespace
