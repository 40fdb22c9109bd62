#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "integer_kernels.hpp"
#include "weight_memory.hpp"

namespace sworker {

/// Whole cache lines of memory, as vectors of 64 bytes need it.
template <typename T>
struct LineAllocator {
    using value_type = T;
    LineAllocator() = default;
    template <typename U>
    LineAllocator(const LineAllocator<U>&) {}
    T* allocate(std::size_t count) {
        return static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t(64)));
    }
    void deallocate(T* memory, std::size_t) {
        ::operator delete(memory, std::align_val_t(64));
    }
    bool operator==(const LineAllocator&) const = default;
};

template <typename T>
using Lines = std::vector<T, LineAllocator<T>>;

/// The kernels in use, and their number of threads.
struct Runner {
    const IntegerKernels* kernels;
    unsigned threads;
};

/// The weights of a linear layer, or of one expert: int8 codes in panels, and a scale per column.
class IntegerWeights {
public:
    /// `codes` [columns, width], rotated in blocks; `scales` [columns] are those of the unrotated weights. `bias` may be
    /// null.
    IntegerWeights(const std::int8_t* codes, std::size_t columns, std::size_t width, std::size_t block,
                   const float* scales, const float* bias, unsigned threads);

    std::size_t columns() const { return columns_; }
    std::size_t width() const { return width_; }
    std::size_t block() const { return block_; }
    std::size_t num_bytes() const;

    /// out [rows, columns] = rows · weights.
    template <typename T>
    void multiply(const SourceRows<T>& source, std::size_t rows, T* out, const Runner& runner) const;
    /// The largest magnitude of each rotated row; ranks compare it before they quantize their parts of the row.
    template <typename T>
    void find_peaks(const SourceRows<T>& source, std::size_t rows, float* peaks, const Runner& runner) const;
    /// The exact sums, int32 [rows, columns], of rows quantized by `peaks`.
    template <typename T>
    void add_up(const SourceRows<T>& source, std::size_t rows, const float* peaks, std::int32_t* sums,
                const Runner& runner) const;
    /// out [rows, columns] of the sums of all ranks.
    template <typename T>
    void scale(const std::int32_t* sums, std::size_t rows, const float* peaks, T* out, const Runner& runner) const;
    /// The weights as plain codes [columns, width].
    void unpack(std::int8_t* codes) const;

private:
    friend class GroupedProduct;
    std::size_t quads() const { return (width_ + QUAD - 1) / QUAD; }
    std::size_t panels() const { return (columns_ + PANEL - 1) / PANEL; }
    std::size_t code_bytes() const { return panels() * quads() * QUAD * PANEL; }
    std::int8_t* panel(std::size_t index) const { return codes_.get() + index * quads() * QUAD * PANEL; }
    void pack_panel(std::size_t index, const std::int8_t* codes);
    std::size_t columns_, width_, block_;
    std::shared_ptr<std::int8_t> codes_;
    Lines<std::int32_t> starts_;
    Lines<float> scales_, bias_;
};

/// Rotate and quantize `rows` rows to plain codes [rows, width], with a scale each.
template <typename T>
void quantize_rows(const SourceRows<T>& source, std::size_t rows, std::int8_t* codes, float* scales,
                   const Runner& runner);

}  // namespace sworker
