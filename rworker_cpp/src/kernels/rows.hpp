// Rows of the payload to floats and back. Rows in memory end at their last element; float rows here are padded to 16.
#pragma once

#include "rworker/kernels.hpp"

namespace {

using rworker::DType;

constexpr int round_up16(int n) { return (n + 15) / 16 * 16; }

template <class L>
inline typename L::vec widen(DType dtype, const void* row, int64_t i) {
    if (dtype == DType::float32) return L::load(static_cast<const float*>(row) + i);
    const uint16_t* half = static_cast<const uint16_t*>(row) + i;
    return dtype == DType::float16 ? L::load_half(half) : L::load_bfloat(half);
}

template <class L>
inline void narrow(DType dtype, typename L::vec x, void* row, int64_t i) {
    if (dtype == DType::float32) return L::store(static_cast<float*>(row) + i, x);
    uint16_t* half = static_cast<uint16_t*>(row) + i;
    dtype == DType::float16 ? L::store_half(half, x) : L::store_bfloat(half, x);
}

constexpr int64_t item_bytes(DType dtype) { return dtype == DType::float32 ? 4 : 2; }

inline void copy_elements(DType dtype, const void* from, void* to, int count) {
    if (count > 0) __builtin_memcpy(to, from, size_t(count * item_bytes(dtype)));
}

inline const void* element(DType dtype, const void* data, int64_t index) {
    return static_cast<const uint8_t*>(data) + index * item_bytes(dtype);
}

/// floats[0..round_up16(n)) = row[0..n) * scale, then zeros.
template <class L>
void widen_row(DType dtype, const void* row, int n, float scale, float* floats) {
    int i = 0;
    for (; i + L::width <= n; i += L::width) L::store(floats + i, L::mul(widen<L>(dtype, row, i), L::set1(scale)));
    if (i == n && n % 16 == 0) return;
    alignas(64) float padded[16 + L::width] = {};
    copy_elements(dtype, element(dtype, row, i), padded, n - i);
    for (int j = 0; i + j < round_up16(n); j += L::width)
        L::store(floats + i + j, j < n - i ? L::mul(widen<L>(dtype, padded, j), L::set1(scale)) : L::set1(0.0f));
}

/// row[0..n) = floats[0..n), rounded to nearest even; floats is readable up to round_up16(n).
template <class L>
void narrow_row(DType dtype, const float* floats, int n, void* row) {
    int i = 0;
    for (; i + L::width <= n; i += L::width) narrow<L>(dtype, L::load(floats + i), row, i);
    if (i == n) return;
    alignas(64) float padded[L::width];
    narrow<L>(dtype, L::load(floats + i), padded, 0);
    copy_elements(dtype, padded, const_cast<void*>(element(dtype, row, i)), n - i);
}

}  // namespace
