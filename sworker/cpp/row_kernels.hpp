#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

/// What models compute between their matrix products, in one pass where torch makes five to ten. A row's bits depend on
/// that row alone, whatever its company.
namespace sworker {

/// Its bits; results are rounded where torch's own operations round.
using BFloat16 = std::uint16_t;

/// out = x / sqrt(mean(x²) + eps) · weight; x and out [rows, dim], weight [dim]. `round_first`: to T before the weight is
/// applied. Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), equation 4. With `residual`, x + residual is
/// normalised, and rounded to T in `total`; both [rows, dim].
template <typename T>
struct RmsNorm {
    const T* x;
    const T* residual;
    const float* weight;
    T* out;
    T* total;
    std::size_t rows, dim;
    float eps;
    bool round_first;
};

/// out = x · cos + rotate_half(x) · sin; x [rows, heads, dim] with `row_stride` elements from row to row, out the same
/// without gaps, cos and sin [rows, dim]. Su et al., "RoFormer" (2021), equation 34, with halves in place of pairs.
template <typename T>
struct Rotation {
    const T* x;
    const T* cos;
    const T* sin;
    T* out;
    std::size_t rows, heads, dim, row_stride;
};

/// out[row] = Σ parts[places[row, i]] · weights[row, i], in the order of i; out [rows, dim], parts [_, dim], places and
/// weights [rows, terms]. Products are rounded to T, and float32 sums once at their end.
template <typename T>
struct WeightedSum {
    const T* parts;
    const std::int64_t* places;
    const T* weights;
    T* out;
    std::size_t rows, terms, dim;
};

/// out = x · weightᵀ; x [rows, width], weight [columns, width], out [rows, columns]. Each sum has a fixed order of
/// additions, whatever is computed beside it.
struct OrderedProduct {
    const float* x;
    const float* weight;
    float* out;
    std::size_t rows, columns, width;
};

/// Coordinate descent of rows of int8 codes q: (exact - q) · moments · (exact - q) falls with each code that changes.
/// `gradient` [rows, width]: (exact - q) · moments, in 1 / unit; `codes` [rows, width] stay within `farthest` of where
/// they began. `moments` [width, width] is symmetric. All sums are integers below 2^53, so they are exact.
struct Descent {
    const double* moments;
    double* gradient;
    std::int8_t* codes;
    std::size_t rows, width, sweeps;
    double unit, farthest;
};

/// out = x + y; all [rows, dim]. `out` may be `x`.
template <typename T>
struct RowSum {
    const T* x;
    const T* y;
    T* out;
    std::size_t dim;
};

/// token = the first largest logit of a row of [rows, vocab]; -1 if the row has NaN or +inf, or nothing but -inf.
template <typename T>
struct Likeliest {
    const T* logits;
    std::int64_t* tokens;
    std::size_t rows, vocab;
};

/// Kernels of one dtype.
template <typename T>
struct RowKernelsOf {
    void (*norm)(const RmsNorm<T>&, std::size_t row);
    void (*rotate)(const Rotation<T>&, std::size_t row);
    void (*sum)(const WeightedSum<T>&, std::size_t row);
    void (*add)(const RowSum<T>&, std::size_t row);
    void (*choose)(const Likeliest<T>&, std::size_t row);
};

/// The same code compiled for one instruction set; each function computes one row.
struct RowKernels {
    const char* isa;
    RowKernelsOf<float> float32;
    RowKernelsOf<BFloat16> bfloat16;
    void (*multiply_row)(const OrderedProduct&, std::size_t row);
    /// `nearest`: scratch [width].
    void (*descend)(const Descent&, std::size_t row, std::int8_t* nearest);
};

/// Return the kernels of dtype T in `kernels`, a `RowKernels` or `IntegerKernels`.
template <typename T, typename Kernels>
const auto& of(const Kernels& kernels) {
    if constexpr (std::is_same_v<T, float>)
        return kernels.float32;
    else
        return kernels.bfloat16;
}

namespace scalar {
extern const RowKernels kernels;
}
namespace avx2 {
extern const RowKernels kernels;
}
namespace avx512 {
extern const RowKernels kernels;
}

}  // namespace sworker
