// What a token needs beside its inputs to update a head's matrix, over any Lanes.
#pragma once

#include "kernels/state_inputs.hpp"

namespace {

/// Decays of a token, [key_dim]; its numbers hold their logs.
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

/// x'y over [0, dim16).
template <class L>
float dot(const float* x, const float* y, int dim16) {
    typename L::vec sum = L::set1(0.0f);
    for (int i = 0; i < dim16; i += L::width) sum = L::fma(L::load(x + i), L::load(y + i), sum);
    return L::reduce_add(sum);
}

}  // namespace
