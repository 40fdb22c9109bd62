#include "rworker/checksum.hpp"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace rworker {
namespace {

constexpr std::uint32_t kPolynomial = 0x82f63b78;  // of CRC-32C, its lowest bit first
constexpr std::int64_t kLanes = 4, kWordBytes = 8;

using Tables = std::array<std::array<std::uint32_t, 256>, kWordBytes>;

/// tables[k][byte]: the CRC of `byte` after k more bytes of zeros.
constexpr Tables make_tables() {
    Tables tables{};
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
        std::uint32_t crc = byte;
        for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? kPolynomial : 0);
        tables[0][byte] = crc;
    }
    for (int k = 1; k < kWordBytes; ++k)
        for (int byte = 0; byte < 256; ++byte)
            tables[k][byte] = tables[k - 1][byte] >> 8 ^ tables[0][tables[k - 1][byte] & 255];
    return tables;
}

constexpr Tables kTables = make_tables();

std::uint32_t next_by_tables(std::uint32_t crc, std::uint64_t word) {
    word ^= crc;
    crc = 0;
    for (int byte = 0; byte < kWordBytes; ++byte) crc ^= kTables[kWordBytes - 1 - byte][word >> 8 * byte & 255];
    return crc;
}

std::uint64_t load(const std::uint8_t* data, std::size_t num_bytes = kWordBytes) {
    std::uint64_t word = 0;
    std::memcpy(&word, data, num_bytes);
    return word;
}

/// The words after the last whole row of four.
template <class Next>
Checksum add_rest(std::span<const std::uint8_t> data, std::size_t at, Checksum lanes, Next next) {
    for (int lane = 0; at < data.size(); ++lane, at += kWordBytes)
        lanes[lane] = next(lanes[lane], load(data.data() + at, std::min<std::size_t>(kWordBytes, data.size() - at)));
    return lanes;
}

Checksum part_by_tables(std::span<const std::uint8_t> data, Checksum start) {
    std::size_t at = 0;
    for (; at + kLanes * kWordBytes <= data.size(); at += kLanes * kWordBytes)
        for (int lane = 0; lane < kLanes; ++lane)
            start[lane] = next_by_tables(start[lane], load(data.data() + at + lane * kWordBytes));
    return add_rest(data, at, start, next_by_tables);
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) Checksum part_by_instruction(std::span<const std::uint8_t> data, Checksum start) {
    std::uint64_t a = start[0], b = start[1], c = start[2], d = start[3];
    std::size_t at = 0;
    for (; at + kLanes * kWordBytes <= data.size(); at += kLanes * kWordBytes) {
        a = _mm_crc32_u64(a, load(data.data() + at));
        b = _mm_crc32_u64(b, load(data.data() + at + 8));
        c = _mm_crc32_u64(c, load(data.data() + at + 16));
        d = _mm_crc32_u64(d, load(data.data() + at + 24));
    }
    return add_rest(data, at, {std::uint32_t(a), std::uint32_t(b), std::uint32_t(c), std::uint32_t(d)}, next_by_tables);
}
#endif

}  // namespace

Checksum checksum_part(std::span<const std::uint8_t> data, Checksum lanes) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("sse4.2")) return part_by_instruction(data, lanes);
#endif
    return part_by_tables(data, lanes);
}

Checksum checksum_end(std::int64_t num_bytes, Checksum lanes) {
    for (std::uint32_t& lane : lanes) lane = next_by_tables(lane, std::uint64_t(num_bytes));
    return lanes;
}

Checksum checksum_by_tables(std::span<const std::uint8_t> data, Checksum start) {
    return checksum_end(std::int64_t(data.size()), part_by_tables(data, start));
}

Checksum checksum(std::span<const std::uint8_t> data, Checksum start) {
    return checksum_end(std::int64_t(data.size()), checksum_part(data, start));
}

}  // namespace rworker
