// Products of rows and the weights of one head: K and V of latents (absorption.hpp).
//
// Each output is a sum over the inputs in ascending order, in one lane. So a row has the same bits whatever other rows
// are computed with it.
#pragma once

#include "kernels/rows.hpp"

namespace {

using rworker::HeadProductArgs;

/// sums[row][16] of one tile of 16 outputs; inputs [Rows][stride] are floats.
template <class L, DType D, int Rows>
inline void multiply_tile(const float* inputs, int stride, int in_dim, const void* tile, float* outputs, int out_stride) {
    constexpr int vectors = 16 / L::width;
    typename L::vec sums[Rows][vectors];
    for (auto& row : sums)
        for (auto& sum : row) sum = L::set1(0.0f);
    for (int i = 0; i < in_dim; ++i) {
        typename L::vec weights[vectors];
        RWORKER_UNROLL
        for (int v = 0; v < vectors; ++v) weights[v] = widen<L, D>(tile, i * 16 + v * L::width);
        RWORKER_UNROLL
        for (int r = 0; r < Rows; ++r) {
            const auto input = L::set1(inputs[r * stride + i]);
            RWORKER_UNROLL
            for (int v = 0; v < vectors; ++v) sums[r][v] = L::fma(input, weights[v], sums[r][v]);
        }
    }
    RWORKER_UNROLL
    for (int r = 0; r < Rows; ++r) {
        RWORKER_UNROLL
        for (int v = 0; v < vectors; ++v) L::store(outputs + r * out_stride + v * L::width, sums[r][v]);
    }
}

/// Computes `Rows` rows, from `row` on.
template <class L, int Rows>
inline void multiply_rows(const HeadProductArgs& args, int64_t row) {
    const int in_stride = round_up16(args.in_dim), out_stride = round_up16(args.out_dim);
    float* const inputs = args.scratch;
    float* const outputs = inputs + Rows * in_stride;
    for (int r = 0; r < Rows; ++r)
        widen_row<L>(args.in_dtype, element(args.in_dtype, args.in, (row + r) * args.in_stride), args.in_dim, 1.0f,
                     inputs + r * in_stride);
    with_dtype(args.dtype, [&]<DType D>() {
        for (int first = 0; first < args.out_dim; first += 16)
            multiply_tile<L, D, Rows>(inputs, in_stride, args.in_dim,
                                      element(args.dtype, args.weights, int64_t(first) * args.in_dim), outputs + first,
                                      out_stride);
    });
    for (int r = 0; r < Rows; ++r)
        narrow_row<L>(args.out_dtype, outputs + r * out_stride, args.out_dim,
                      const_cast<void*>(element(args.out_dtype, args.out, (row + r) * args.out_stride)));
}

template <class L>
void multiply_by_head(const HeadProductArgs& args) {
    constexpr int many = L::width == 16 ? 12 : 6;  // number of sums that fit the registers beside weights and input
    static_assert(many <= rworker::kProductRows);
    int64_t row = 0;
    for (; row + many <= args.num_rows; row += many) multiply_rows<L, many>(args, row);
    for (; row + 3 <= args.num_rows; row += 3) multiply_rows<L, 3>(args, row);
    for (; row < args.num_rows; ++row) multiply_rows<L, 1>(args, row);
}

}  // namespace
