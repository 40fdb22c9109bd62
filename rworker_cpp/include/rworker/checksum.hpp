// A checksum of bytes at the speed of memory.
#pragma once

#include <array>
#include <cstdint>
#include <span>

namespace rworker {

/// Four CRC-32C side by side: of the data's words of eight bytes, little-endian, word i goes into that of lane i mod 4;
/// the last word is filled up with zeros, and all lanes end with the number of bytes. Any change within 32 consecutive
/// bits has another checksum, any other one but once in 2^32.
using Checksum = std::array<std::uint32_t, 4>;

/// Of `data`, the lanes beginning as `start` says: by the processor's instruction where it has one.
Checksum checksum(std::span<const std::uint8_t> data, Checksum start);
/// The same by tables.
Checksum checksum_by_tables(std::span<const std::uint8_t> data, Checksum start);

}  // namespace rworker
