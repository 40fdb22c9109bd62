#include "integer_weights.hpp"

#include <algorithm>
#include <cstring>

#include "parallel.hpp"

namespace sworker {

/// Rows are multiplied in blocks of nearly equal size: 16 rows are two blocks of 8, not of 12 and 4.
struct RowBlocks {
    std::size_t rows;
    std::size_t count = (rows + MOST_ROWS - 1) / MOST_ROWS;
    std::size_t begin(std::size_t index) const { return index * rows / count; }
    std::size_t size(std::size_t index) const { return begin(index + 1) - begin(index); }
};

namespace {

float* scratch_of(std::size_t width) {
    thread_local Lines<float> scratch;
    const std::size_t padded = (width + LANES - 1) / LANES * LANES;
    if (scratch.size() < padded) scratch.resize(padded);
    return scratch.data();
}

float rotate(const IntegerKernels& kernels, const SourceRows<float>& source, std::size_t row, float* y) {
    return kernels.rotate_float32(source, row, y);
}

float rotate(const IntegerKernels& kernels, const SourceRows<BFloat16>& source, std::size_t row, float* y) {
    return kernels.rotate_bfloat16(source, row, y);
}

void scale_block(const IntegerKernels& kernels, const Scaling<float>& job) {
    kernels.scale_float32(job);
}

void scale_block(const IntegerKernels& kernels, const Scaling<BFloat16>& job) {
    kernels.scale_bfloat16(job);
}

/// Codes of all rows, block by block. `peaks` are read if they are given, else written.
template <typename T>
const char* quantize_blocks(const SourceRows<T>& source, std::size_t rows, const float* peaks, float* own_peaks,
                            const Runner& runner) {
    thread_local Lines<char> memory;
    const IntegerKernels& kernels = *runner.kernels;
    const std::size_t row_bytes = (source.width + QUAD - 1) / QUAD * QUAD * kernels.code_bytes;
    if (memory.size() < rows * row_bytes) memory.resize(rows * row_bytes);
    char* codes = memory.data();
    const RowBlocks blocks{rows};
    parallel_for(rows, runner.threads, [&](std::size_t row) {
        std::size_t index = row * blocks.count / rows;
        while (blocks.begin(index) > row) --index;
        while (blocks.begin(index + 1) <= row) ++index;
        const std::size_t begin = blocks.begin(index);
        float* y = scratch_of(source.width);
        const float own = rotate(kernels, source, row, y);
        if (own_peaks) own_peaks[row] = own;
        char* place = codes + begin * row_bytes + (row - begin) * QUAD * kernels.code_bytes;
        kernels.quantize(y, source.width, peaks ? peaks[row] : own, {place, blocks.size(index) * QUAD});
    });
    return codes;
}

}  // namespace

IntegerWeights::IntegerWeights(const std::int8_t* codes, std::size_t columns, std::size_t width, std::size_t block,
                               const float* scales, const float* bias, unsigned threads)
    : columns_(columns),
      width_(width),
      block_(block),
      codes_(panels() * quads() * QUAD * PANEL),
      starts_(panels() * PANEL),
      scales_(panels() * PANEL),
      bias_(bias ? panels() * PANEL : 0) {
    for (std::size_t column = 0; column < columns; ++column) {
        scales_[column] = scales[column] / float(hadamard_part(block));
        if (bias) bias_[column] = bias[column];
    }
    parallel_for(panels(), threads, [&](std::size_t index) { pack_panel(index, codes); });
}

void IntegerWeights::pack_panel(std::size_t index, const std::int8_t* codes) {
    std::int8_t* packed = codes_.data() + index * quads() * QUAD * PANEL;
    for (std::size_t lane = 0; lane < PANEL && index * PANEL + lane < columns_; ++lane) {
        const std::int8_t* own = codes + (index * PANEL + lane) * width_;
        std::int32_t sum = 0;
        for (std::size_t i = 0; i < width_; ++i) {
            packed[(i / QUAD * PANEL + lane) * QUAD + i % QUAD] = own[i];
            sum += own[i];
        }
        starts_[index * PANEL + lane] = -128 * sum;
    }
}

void IntegerWeights::unpack(std::int8_t* codes) const {
    for (std::size_t column = 0; column < columns_; ++column)
        for (std::size_t i = 0; i < width_; ++i)
            codes[column * width_ + i] =
                panel(column / PANEL)[(i / QUAD * PANEL + column % PANEL) * QUAD + i % QUAD];
}

std::size_t IntegerWeights::num_bytes() const {
    return codes_.size() + 4 * (starts_.size() + scales_.size() + bias_.size());
}

/// `done(row, rows, panel, sums)`: handles the sums of a block of rows and a panel.
template <typename Done>
void IntegerWeights::multiply_panels(const char* codes, std::size_t rows, const Runner& runner,
                                     const Done& done) const {
    const RowBlocks blocks{rows};
    const std::size_t row_bytes = quads() * QUAD * runner.kernels->code_bytes;
    parallel_for(panels(), runner.threads, [&](std::size_t index) {
        alignas(64) std::int32_t sums[MOST_ROWS * PANEL];
        for (std::size_t block = 0; block < blocks.count; ++block) {
            const std::size_t begin = blocks.begin(block), size = blocks.size(block);
            runner.kernels->multiply(
                {codes + begin * row_bytes, size, quads(), panel(index), starts_.data() + index * PANEL, sums});
            done(begin, size, index, sums);
        }
    });
}

template <typename T>
void IntegerWeights::multiply(const SourceRows<T>& source, std::size_t rows, T* out, const Runner& runner) const {
    thread_local Lines<float> row_scales;
    if (row_scales.size() < rows) row_scales.resize(rows);
    float* scales = row_scales.data();
    const char* codes = quantize_blocks(source, rows, nullptr, scales, runner);
    for (std::size_t row = 0; row < rows; ++row) scales[row] = scale_of(scales[row]);
    multiply_panels(codes, rows, runner, [&](std::size_t row, std::size_t count, std::size_t index, auto* sums) {
        const std::size_t first = index * PANEL;
        scale_block(*runner.kernels,
                    Scaling<T>{sums, scales_.data() + first, bias_.empty() ? nullptr : bias_.data() + first,
                               scales + row, out + row * columns_ + first, count, std::min(PANEL, columns_ - first),
                               PANEL, columns_});
    });
}

template <typename T>
void IntegerWeights::find_peaks(const SourceRows<T>& source, std::size_t rows, float* peaks,
                                const Runner& runner) const {
    parallel_for(rows, runner.threads, [&](std::size_t row) {
        peaks[row] = rotate(*runner.kernels, source, row, scratch_of(source.width));
    });
}

template <typename T>
void IntegerWeights::add_up(const SourceRows<T>& source, std::size_t rows, const float* peaks, std::int32_t* sums,
                            const Runner& runner) const {
    const char* codes = quantize_blocks(source, rows, peaks, nullptr, runner);
    multiply_panels(codes, rows, runner, [&](std::size_t row, std::size_t count, std::size_t index, auto* found) {
        const std::size_t first = index * PANEL, columns = std::min(PANEL, columns_ - first);
        for (std::size_t i = 0; i < count; ++i)
            std::memcpy(sums + (row + i) * columns_ + first, found + i * PANEL, columns * sizeof(std::int32_t));
    });
}

template <typename T>
void IntegerWeights::scale(const std::int32_t* sums, std::size_t rows, const float* peaks, T* out,
                           const Runner& runner) const {
    parallel_for(rows, runner.threads, [&](std::size_t row) {
        const float row_scale = scale_of(peaks[row]);
        scale_block(*runner.kernels,
                    Scaling<T>{sums + row * columns_, scales_.data(), bias_.empty() ? nullptr : bias_.data(),
                               &row_scale, out + row * columns_, 1, columns_, columns_, columns_});
    });
}

template <typename T>
void quantize_rows(const SourceRows<T>& source, std::size_t rows, std::int8_t* codes, float* scales,
                   const Runner& runner) {
    parallel_for(rows, runner.threads, [&](std::size_t row) {
        float* y = scratch_of(source.width);
        const float peak = rotate(*runner.kernels, source, row, y);
        runner.kernels->quantize_plain(y, source.width, peak, codes + row * source.width);
        scales[row] = scale_of(peak);
    });
}

#define SWORKER_INSTANTIATE(T)                                                                                      \
    template void IntegerWeights::multiply(const SourceRows<T>&, std::size_t, T*, const Runner&) const;             \
    template void IntegerWeights::find_peaks(const SourceRows<T>&, std::size_t, float*, const Runner&) const;       \
    template void IntegerWeights::add_up(const SourceRows<T>&, std::size_t, const float*, std::int32_t*,            \
                                         const Runner&) const;                                                      \
    template void IntegerWeights::scale(const std::int32_t*, std::size_t, const float*, T*, const Runner&) const;   \
    template void quantize_rows(const SourceRows<T>&, std::size_t, std::int8_t*, float*, const Runner&);
SWORKER_INSTANTIATE(float)
SWORKER_INSTANTIATE(BFloat16)

}  // namespace sworker
