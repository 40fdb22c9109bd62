#include "integer_weights.hpp"

#include <algorithm>
#include <cstring>

#include "grouped_product.hpp"

namespace sworker {

IntegerWeights::IntegerWeights(const std::int8_t* codes, std::size_t columns, std::size_t width, std::size_t block,
                               const float* scales, const float* bias, unsigned threads)
    : columns_(columns),
      width_(width),
      block_(block),
      codes_(weight_memory(code_bytes())),
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
    std::int8_t* packed = panel(index);
    const std::int8_t* first = codes + index * PANEL * width_;
    const std::size_t lanes = std::min(PANEL, columns_ - index * PANEL), whole = width_ / QUAD * QUAD;
    for (std::size_t i = 0; i < whole; i += QUAD)
        for (std::size_t lane = 0; lane < lanes; ++lane)
            std::memcpy(packed + (i * PANEL) + lane * QUAD, first + lane * width_ + i, QUAD);
    for (std::size_t lane = 0; lane < lanes; ++lane) {
        const std::int8_t* own = first + lane * width_;
        for (std::size_t i = whole; i < width_; ++i) packed[whole * PANEL + lane * QUAD + i - whole] = own[i];
        std::int32_t sum = 0;
        for (std::size_t i = 0; i < width_; ++i) sum += own[i];
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
    return code_bytes() + 4 * (starts_.size() + scales_.size() + bias_.size());
}

template <typename T>
void IntegerWeights::multiply(const SourceRows<T>& source, std::size_t rows, T* out, const Runner& runner) const {
    const RowGroup all{this, 0, rows};
    GroupedProduct({&all, 1}).multiply(source, out, runner);
}

template <typename T>
void IntegerWeights::find_peaks(const SourceRows<T>& source, std::size_t rows, float* peaks,
                                const Runner& runner) const {
    parallel_for(rows, runner.threads, [&](std::size_t row) {
        peaks[row] = of<T>(*runner.kernels).rotate(source, row, scratch_of(source.width));
    });
}

template <typename T>
void IntegerWeights::add_up(const SourceRows<T>& source, std::size_t rows, const float* peaks, std::int32_t* sums,
                            const Runner& runner) const {
    const RowGroup all{this, 0, rows};
    GroupedProduct({&all, 1}).add_up(source, peaks, sums, runner);
}

template <typename T>
void IntegerWeights::scale(const std::int32_t* sums, std::size_t rows, const float* peaks, T* out,
                           const Runner& runner) const {
    const RowGroup all{this, 0, rows};
    GroupedProduct({&all, 1}).scale(sums, peaks, out, runner);
}

/// Blocks of a group have nearly equal size: 16 rows are two blocks of 8, not of 12 and 4.
GroupedProduct::GroupedProduct(std::span<const RowGroup> groups) : groups_(groups) {
    for (const RowGroup& group : groups) {
        first_blocks_.push_back(blocks_.size());
        const std::size_t rows = group.end - group.begin, count = (rows + MOST_ROWS - 1) / MOST_ROWS;
        for (std::size_t i = 0; i < count; ++i) {
            const std::size_t begin = i * rows / count;
            blocks_.push_back({group.begin + begin, (i + 1) * rows / count - begin});
        }
    }
    first_blocks_.push_back(blocks_.size());
}

template <typename T>
void GroupedProduct::multiply(const SourceRows<T>& source, T* out, const Runner& runner) const {
    multiply_read(source.width, [&](std::size_t row, float* y) { return of<T>(*runner.kernels).rotate(source, row, y); }, out,
                  runner);
}

template <typename T>
void GroupedProduct::add_up(const SourceRows<T>& source, const float* peaks, std::int32_t* sums,
                            const Runner& runner) const {
    if (!rows()) return;
    const auto read = [&](std::size_t row, float* y) { return of<T>(*runner.kernels).rotate(source, row, y); };
    const char* codes = quantize(source.width, read, peaks, nullptr, runner);
    const std::size_t all = any().columns_;
    multiply_panels(codes, runner, [&](const IntegerWeights&, const Block& block, std::size_t panel, auto* found) {
        const std::size_t first = panel * PANEL, columns = std::min(PANEL, all - first);
        for (std::size_t i = 0; i < block.size; ++i)
            std::memcpy(sums + (block.begin + i) * all + first, found + i * PANEL, columns * sizeof(std::int32_t));
    });
}

template <typename T>
void GroupedProduct::scale(const std::int32_t* sums, const float* peaks, T* out, const Runner& runner) const {
    parallel_for(blocks_.size(), runner.threads, [&](std::size_t index) {
        const Block& block = blocks_[index];
        const auto is_before = [](std::size_t each, const RowGroup& group) { return each < group.end; };
        const IntegerWeights& own =
            *std::upper_bound(groups_.begin(), groups_.end(), block.begin, is_before)->weights;
        const std::size_t all = own.columns_;
        float row_scales[MOST_ROWS];
        for (std::size_t i = 0; i < block.size; ++i) row_scales[i] = scale_of(peaks[block.begin + i]);
        of<T>(*runner.kernels)
            .scale({sums + block.begin * all, own.scales_.data(), own.bias_.empty() ? nullptr : own.bias_.data(),
                    row_scales, out + block.begin * all, block.size, all, all, all});
    });
}

template <typename T>
void quantize_rows(const SourceRows<T>& source, std::size_t rows, std::int8_t* codes, float* scales,
                   const Runner& runner) {
    parallel_for(rows, runner.threads, [&](std::size_t row) {
        float* y = scratch_of(source.width);
        const float peak = of<T>(*runner.kernels).rotate(source, row, y);
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
    template void GroupedProduct::multiply(const SourceRows<T>&, T*, const Runner&) const;                          \
    template void GroupedProduct::add_up(const SourceRows<T>&, const float*, std::int32_t*, const Runner&) const;   \
    template void GroupedProduct::scale(const std::int32_t*, const float*, T*, const Runner&) const;                \
    template void quantize_rows(const SourceRows<T>&, std::size_t, std::int8_t*, float*, const Runner&);
SWORKER_INSTANTIATE(float)
SWORKER_INSTANTIATE(BFloat16)

}  // namespace sworker
