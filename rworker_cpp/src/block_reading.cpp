#include "rworker/block_reading.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace rworker {
namespace {

constexpr std::size_t kPartBytes = 1 << 17;  // a multiple of kChecksumRow that fits the second-level cache

}  // namespace

ReadJob::ReadJob(int fd, std::span<FilePiece> pieces, std::vector<std::vector<std::span<std::uint8_t>>> places)
    : fd_(fd), pieces_(pieces), places_(std::move(places)) {
    num_items_ = std::int64_t(pieces.size());
    worth_helpers_ = num_items_ > 1;
}

void ReadJob::run(std::int64_t piece, std::int64_t, int) noexcept {
    FilePiece& mine = pieces_[piece];
    std::int64_t offset = mine.offset;
    for (std::span<std::uint8_t> run : places_[piece]) {
        while (!run.empty()) {
            const std::span<std::uint8_t> part = run.first(std::min(run.size(), kPartBytes));
            if (!read(part, offset)) return;
            mine.checksum = checksum_part(part, mine.checksum);
            offset += std::int64_t(part.size());
            run = run.subspan(part.size());
        }
    }
    mine.checksum = checksum_end(offset - mine.offset, mine.checksum);
}

bool ReadJob::read(std::span<std::uint8_t> bytes, std::int64_t offset) noexcept {
    while (!bytes.empty()) {
        const ssize_t count = pread(fd_, bytes.data(), bytes.size(), offset);
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) {
            error_.store(count < 0 ? errno : kFileEnds, std::memory_order_relaxed);
            return false;
        }
        bytes = bytes.subspan(std::size_t(count));
        offset += count;
    }
    return true;
}

}  // namespace rworker
