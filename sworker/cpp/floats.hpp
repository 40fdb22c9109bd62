#pragma once

#include "row_kernels.hpp"

/// Conversions that round as torch's own operations do; internal to each file that is compiled per instruction set.
namespace sworker::SWORKER_ISA {
namespace {

inline float load(float value) {
    return value;
}

inline float load(BFloat16 value) {
    return __builtin_bit_cast(float, std::uint32_t(value) << 16);
}

/// `value` as a T, to the nearest, ties to even.
template <typename T>
T as(float value) {
    return value;
}

template <>
[[maybe_unused]] inline BFloat16 as<BFloat16>(float value) {
    const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, value);
    const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    return BFloat16(nan ? 0x7fc0u : rounded);
}

/// `value` rounded to T and back.
template <typename T>
float round_to(float value) {
    return value;
}

/// The same as `load(as<BFloat16>(value))`; all in 32 bits, since a loop over two widths is slow.
template <>
[[maybe_unused]] inline float round_to<BFloat16>(float value) {
    const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, value);
    const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
    const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    return __builtin_bit_cast(float, nan ? 0x7fc00000u : rounded);
}

}  // namespace
}  // namespace sworker::SWORKER_ISA
