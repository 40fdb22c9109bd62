// Folding the partial results of a sequence's splits, always in their order.
#pragma once

#include "kernels/math.hpp"
#include "kernels/rows.hpp"

namespace {

using rworker::MergeArgs;

/// A partial result in memory; see partial_floats.
template <class Float>
struct Partial {
    Float *max, *sum, *output;
    int padded_dim;

    Partial(Float* data, int64_t rows, int value_dim)
        : max(data), sum(data + rows), output(data + (rows * 2 + 15) / 16 * 16), padded_dim(round_up16(value_dim)) {}
    Float* output_row(int64_t row) const { return output + row * padded_dim; }
};

/// Row r of the stacked queries or outputs of a (span, KV head).
inline int64_t row_offset(const rworker::RowView& view, int64_t row) {
    return row / view.group * view.token_stride + row % view.group * view.head_stride;
}

/// (max, sum, output) of one row <- itself + a part. An empty part (max -inf) leaves every bit as it was.
template <class L>
inline void fold(float& max, float& sum, float* output, float part_max, float part_sum, const float* part_output,
                 int n) {
    if (part_max == -kInfinity) return;
    const float new_max = max > part_max ? max : part_max;
    const float keep = exp_nonpositive_one<L>(max - new_max), weight = exp_nonpositive_one<L>(part_max - new_max);
    max = new_max;
    sum = sum * keep + part_sum * weight;
    for (int d = 0; d < n; d += L::width) {
        const auto kept = L::mul(L::load(output + d), L::set1(keep));
        L::store(output + d, part_output ? L::fma(L::load(part_output + d), L::set1(weight), kept) : kept);
    }
}

template <class L>
void merge(const MergeArgs& args) {
    const int padded_dim = round_up16(args.value_dim);
    for (int64_t row = 0; row < args.rows.rows; ++row) {
        float max = -kInfinity, sum = 0.0f;
        float* output = args.scratch;
        for (int d = 0; d < padded_dim; d += L::width) L::store(output + d, L::set1(0.0f));
        for (int64_t i = 0; i < args.num_partials; ++i) {
            const Partial<const float> part(args.partials + i * args.partial_stride, args.rows.rows, args.value_dim);
            fold<L>(max, sum, output, part.max[row], part.sum[row], part.output_row(row), padded_dim);
        }
        // A sink is a score without a value: it only takes its share of the sum.
        if (args.sinks) fold<L>(max, sum, output, args.sinks[row % args.rows.group], 1.0f, nullptr, padded_dim);
        for (int d = 0; d < padded_dim; d += L::width) L::store(output + d, L::div(L::load(output + d), L::set1(sum)));
        void* out = const_cast<void*>(element(args.dtype, args.out, row_offset(args.rows, row)));
        narrow_row<L>(args.dtype, output, args.value_dim, out);
    }
}

}  // namespace
