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
/// The lanes after `data`, whole rows of kChecksumRow bytes but for the last part of all, and in the end after the number
/// of bytes of all parts: `checksum` of data that comes in parts.
Checksum checksum_part(std::span<const std::uint8_t> data, Checksum lanes);
Checksum checksum_end(std::int64_t num_bytes, Checksum lanes);
constexpr std::int64_t kChecksumRow = 32;
/// The same by tables.
Checksum checksum_by_tables(std::span<const std::uint8_t> data, Checksum start);

}  // namespace rworker
