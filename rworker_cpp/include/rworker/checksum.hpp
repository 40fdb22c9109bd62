// A checksum of bytes at the speed of memory.
#pragma once

#include <array>
#include <cstdint>
#include <span>

namespace rworker {

/// Four CRC-32C in lanes. Word i of the data (eight bytes, little-endian) goes into lane i mod 4. The last word is
/// filled up with zeros, and every lane ends with the number of bytes. A change within 32 consecutive bits always
/// changes the checksum; another change is missed once in 2^32.
using Checksum = std::array<std::uint32_t, 4>;

/// Returns the checksum of `data` with lanes that begin at `start`. It uses the processor's instruction where there is
/// one.
Checksum checksum(std::span<const std::uint8_t> data, Checksum start);
/// Returns the lanes after one part of the data. Each part is whole rows of kChecksumRow bytes, except the last. At the
/// end, the lanes include the number of bytes of all parts, as `checksum` does.
Checksum checksum_part(std::span<const std::uint8_t> data, Checksum lanes);
Checksum checksum_end(std::int64_t num_bytes, Checksum lanes);
constexpr std::int64_t kChecksumRow = 32;
/// The same checksum, computed by tables.
Checksum checksum_by_tables(std::span<const std::uint8_t> data, Checksum start);

}  // namespace rworker
