#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "integer_weights.hpp"
#include "parallel.hpp"

namespace sworker {

inline float* scratch_of(std::size_t width) {
    thread_local Lines<float> scratch;
    const std::size_t padded = (width + LANES - 1) / LANES * LANES;
    if (scratch.size() < padded) scratch.resize(padded);
    return scratch.data();
}

/// Rows `begin` to `end`, which `weights` multiply.
struct RowGroup {
    const IntegerWeights* weights;
    std::size_t begin, end;
};

/// Groups of rows, one after another from row 0, each with its own weights; all weights have one shape and block. Threads
/// share all groups' panels, so a mixture's experts with few rows need no parallel region each.
class GroupedProduct {
public:
    explicit GroupedProduct(std::span<const RowGroup> groups);

    /// See `IntegerWeights`, whose functions of these names are those of one group.
    template <typename T>
    void multiply(const SourceRows<T>& source, T* out, const Runner& runner) const;
    /// The same with rows that `read(row, y)` rotates into `y` and whose peak it returns; rows may be read in any order.
    template <typename T, typename Read>
    void multiply_read(std::size_t width, const Read& read, T* out, const Runner& runner) const;
    template <typename T>
    void add_up(const SourceRows<T>& source, const float* peaks, std::int32_t* sums, const Runner& runner) const;
    template <typename T>
    void scale(const std::int32_t* sums, const float* peaks, T* out, const Runner& runner) const;

private:
    /// Rows of one group that one pass over a panel multiplies.
    struct Block {
        std::size_t begin, size;
    };

    std::size_t rows() const { return groups_.empty() ? 0 : groups_.back().end; }
    const IntegerWeights& any() const { return *groups_.front().weights; }
    template <typename Read>
    const char* quantize(std::size_t width, const Read& read, const float* peaks, float* own_peaks,
                         const Runner& runner) const;
    template <typename Done>
    void multiply_panels(const char* codes, const Runner& runner, const Done& done) const;

    std::span<const RowGroup> groups_;
    std::vector<Block> blocks_;
    /// The first block of each group, and the number of all blocks.
    std::vector<std::size_t> first_blocks_;
};

/// Codes of all rows, block by block. `peaks` are read if they are given, else written to `own_peaks`.
template <typename Read>
const char* GroupedProduct::quantize(std::size_t width, const Read& read, const float* peaks, float* own_peaks,
                                     const Runner& runner) const {
    thread_local Lines<char> memory;
    const IntegerKernels& kernels = *runner.kernels;
    const std::size_t row_bytes = any().quads() * QUAD * kernels.code_bytes;
    if (memory.size() < rows() * row_bytes) memory.resize(rows() * row_bytes);
    char* codes = memory.data();
    constexpr std::size_t few = 1 << 13;  // elements that this thread quantizes before others would have started
    const unsigned threads = rows() * width < few ? 1 : runner.threads;
    parallel_for(rows(), threads, [&](std::size_t row) {
        const auto is_before = [](std::size_t each, const Block& block) { return each < block.begin; };
        const Block& block = *(std::upper_bound(blocks_.begin(), blocks_.end(), row, is_before) - 1);
        float* y = scratch_of(width);
        const float own = read(row, y);
        if (own_peaks) own_peaks[row] = own;
        char* place = codes + block.begin * row_bytes + (row - block.begin) * QUAD * kernels.code_bytes;
        kernels.quantize(y, width, peaks ? peaks[row] : own, {place, block.size * QUAD});
    });
    return codes;
}

/// `done(group, block, panel, sums)`: handles the sums of a block of rows and a panel of its group's weights. The passes
/// over a panel prefetch the next one: in two halves, or at once if there is only one pass.
template <typename Done>
void GroupedProduct::multiply_panels(const char* codes, const Runner& runner, const Done& done) const {
    const std::size_t panels = any().panels(), quads = any().quads(), tasks = groups_.size() * panels;
    const std::size_t row_bytes = quads * QUAD * runner.kernels->code_bytes, half_panel = quads * QUAD * PANEL / 2;
    constexpr std::size_t line = 64;
    parallel_for(tasks, runner.threads, [&](std::size_t task) {
        const std::size_t group = task / panels, panel = task % panels, next = std::min(task + 1, tasks - 1);
        const IntegerWeights& weights = *groups_[group].weights;
        const std::int8_t* ahead = groups_[next / panels].weights->panel(next % panels);
        alignas(64) std::int32_t sums[MOST_ROWS * PANEL];
        const std::size_t first = first_blocks_[group], end = first_blocks_[group + 1];
        for (std::size_t index = first; index < end; ++index) {
            const Block& block = blocks_[index];
            const std::size_t pass = index - first, step = end - first == 1 ? 2 * line : pass < 2 ? line : 0;
            runner.kernels->multiply({codes + block.begin * row_bytes, block.size, quads, weights.panel(panel),
                                      weights.starts_.data() + panel * PANEL, sums,
                                      ahead + (pass == 1 ? half_panel : 0), step});
            done(weights, block, panel, sums);
        }
    });
}

template <typename T, typename Read>
void GroupedProduct::multiply_read(std::size_t width, const Read& read, T* out, const Runner& runner) const {
    if (!rows()) return;
    thread_local Lines<float> row_scales;
    if (row_scales.size() < rows()) row_scales.resize(rows());
    float* scales = row_scales.data();
    const char* codes = quantize(width, read, nullptr, scales, runner);
    for (std::size_t row = 0; row < rows(); ++row) scales[row] = scale_of(scales[row]);
    const std::size_t all = any().columns_;
    multiply_panels(codes, runner, [&](const IntegerWeights& own, const Block& block, std::size_t panel, auto* sums) {
        const std::size_t first = panel * PANEL;
        of<T>(*runner.kernels)
            .scale({sums, own.scales_.data() + first, own.bias_.empty() ? nullptr : own.bias_.data() + first,
                    scales + block.begin, out + block.begin * all + first, block.size, std::min(PANEL, all - first),
                    PANEL, all});
    });
}

}  // namespace sworker
