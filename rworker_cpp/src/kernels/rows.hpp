// Converts rows of the payload to floats and back. Rows in memory end at their last element; float rows here are padded
// to 16.
#pragma once

#include "rworker/kernels.hpp"

#define RWORKER_UNROLL _Pragma("GCC unroll 16")

namespace {

using rworker::DType;

constexpr int round_up16(int n) { return (n + 15) / 16 * 16; }

/// Calls f.operator()<dtype>() for the dtype of a payload, so that loops over elements do not check it again.
template <class F>
inline void with_dtype(DType dtype, F f) {
    if (dtype == DType::float32) return f.template operator()<DType::float32>();
    if (dtype == DType::float16) return f.template operator()<DType::float16>();
    f.template operator()<DType::bfloat16>();
}

template <class L, DType D>
inline typename L::vec widen(const void* row, int64_t i) {
    if constexpr (D == DType::float32) return L::load(static_cast<const float*>(row) + i);
    if constexpr (D == DType::float16) return L::load_half(static_cast<const uint16_t*>(row) + i);
    if constexpr (D == DType::bfloat16) return L::load_bfloat(static_cast<const uint16_t*>(row) + i);
}

template <class L, DType D>
inline void narrow(typename L::vec x, void* row, int64_t i) {
    if constexpr (D == DType::float32) L::store(static_cast<float*>(row) + i, x);
    if constexpr (D == DType::float16) L::store_half(static_cast<uint16_t*>(row) + i, x);
    if constexpr (D == DType::bfloat16) L::store_bfloat(static_cast<uint16_t*>(row) + i, x);
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
    const int whole = n / L::width * L::width;
    alignas(64) float last[L::width] = {};  // elements of the last vector, zeros behind them
    copy_elements(dtype, element(dtype, row, whole), last, n - whole);
    with_dtype(dtype, [&]<DType D>() {
        for (int i = 0; i < whole; i += L::width) L::store(floats + i, L::mul(widen<L, D>(row, i), L::set1(scale)));
        if (whole < n) L::store(floats + whole, L::mul(widen<L, D>(last, 0), L::set1(scale)));
    });
    for (int i = (n + L::width - 1) / L::width * L::width; i < round_up16(n); i += L::width)
        L::store(floats + i, L::set1(0.0f));
}

/// row[0..n) = floats[0..n), rounded to nearest even; floats is readable up to round_up16(n).
template <class L>
void narrow_row(DType dtype, const float* floats, int n, void* row) {
    const int whole = n / L::width * L::width;
    alignas(64) float last[L::width];
    with_dtype(dtype, [&]<DType D>() {
        for (int i = 0; i < whole; i += L::width) narrow<L, D>(L::load(floats + i), row, i);
        if (whole < n) narrow<L, D>(L::load(floats + whole), last, 0);
    });
    copy_elements(dtype, last, const_cast<void*>(element(dtype, row, whole)), n - whole);
}

}  // namespace
