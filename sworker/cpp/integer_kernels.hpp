#pragma once

#include <cstddef>
#include <cstdint>

#include "row_kernels.hpp"

/// Products of rows and weights in int8 codes. The sums are exact, and every float is computed in one fixed order, so a
/// row's bits depend on neither the instruction set, nor threads, nor the rows beside it.
namespace sworker {

/// Columns of weights that lie side by side in memory: panels of [width / QUAD, PANEL, QUAD] codes.
constexpr std::size_t PANEL = 32;
/// Neighbouring elements of a row that one instruction multiplies and adds.
constexpr std::size_t QUAD = 4;
/// Rows that one pass over a panel multiplies. Codes of so many rows lie as [width / QUAD, rows, QUAD].
constexpr std::size_t MOST_ROWS = 12;
/// Elements in one vector of the row kernels; scratch is padded to a multiple of this number.
constexpr std::size_t LANES = 16;
/// Rows whose largest element is smaller count as zeros.
constexpr float LEAST_PEAK = 1e-30f;

enum class Activation { none, silu, gelu_tanh };

/// Rows [rows, width] that are rotated and quantized: x, or activation(gate) · x, rounded to T after each operation.
/// `block`: neighbouring elements that are mixed, see `is_block`.
template <typename T>
struct SourceRows {
    const T* x;
    const T* gate;
    std::size_t x_stride, gate_stride, width, block;
    Activation activation;
};

/// Where the codes of a row go: element i at [i / QUAD · quad_stride + i % QUAD].
struct CodePlace {
    void* codes;
    std::size_t quad_stride;
};

/// One pass of `rows` rows over a panel. `start`: what each column's sums begin with where rows are unsigned. `sums`:
/// [rows, PANEL]. `ahead`: memory that the pass prefetches, `ahead_step` bytes per quad.
struct PanelProduct {
    const void* codes;
    std::size_t rows, quads;
    const std::int8_t* panel;
    const std::int32_t* start;
    std::int32_t* sums;
    const std::int8_t* ahead;
    std::size_t ahead_step;
};

/// out = (sums · column_scale) · row_scale + bias; `sums` [rows, sums_stride], `out` [rows, out_stride].
template <typename T>
struct Scaling {
    const std::int32_t* sums;
    const float* column_scales;
    const float* bias;
    const float* row_scales;
    T* out;
    std::size_t rows, columns, sums_stride, out_stride;
};

/// Kernels of one dtype.
template <typename T>
struct IntegerKernelsOf {
    /// Rotate a row into `y`, padded to a multiple of LANES. Return the largest magnitude in `y`; NaN if one is NaN.
    float (*rotate)(const SourceRows<T>&, std::size_t row, float* y);
    void (*scale)(const Scaling<T>&);
};

/// The same code compiled for one instruction set. `code_bytes`: of one code of a row, 1 where rows are unsigned with
/// zero point 128, else 2.
struct IntegerKernels {
    const char* isa;
    std::size_t code_bytes;
    IntegerKernelsOf<float> float32;
    IntegerKernelsOf<BFloat16> bfloat16;
    /// Quantize `y` for the product to codes of -127 to 127 by its row's peak; the width is padded to QUAD.
    void (*quantize)(const float* y, std::size_t width, float peak, const CodePlace&);
    /// The same to plain int8, as weights are stored.
    void (*quantize_plain)(const float* y, std::size_t width, float peak, std::int8_t* codes);
    void (*multiply)(const PanelProduct&);
};

/// Elements that one Hadamard matrix mixes; a block may have several such parts, which reflections mix.
constexpr std::size_t hadamard_part(std::size_t block) {
    return block & -block;
}

/// A block divides the width. Its size has the factors 2, 3, 5 and 7; parts that are mixed fill whole vectors.
constexpr bool is_block(std::size_t block, std::size_t width) {
    if (block == 0 || width % block != 0) return false;
    std::size_t parts = block / hadamard_part(block);
    const bool is_wide = parts == 1 || hadamard_part(block) % LANES == 0;
    for (std::size_t factor = 3; factor <= 7; factor += 2)
        while (parts % factor == 0) parts /= factor;
    return is_wide && parts == 1;
}

/// The scale of a row whose largest magnitude is `peak`.
inline float scale_of(float peak) {
    return peak < LEAST_PEAK ? 0.0f : peak / 127.0f;
}

namespace scalar {
extern const IntegerKernels integer_kernels;
}
namespace avx2 {
extern const IntegerKernels integer_kernels;
}
namespace avx512_vnni {
extern const IntegerKernels integer_kernels;
}

}  // namespace sworker
