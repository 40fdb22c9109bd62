#include "rworker/arena.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <new>

namespace rworker {
namespace {

#ifdef RWORKER_PORTABLE
void ask_for_huge_pages(void*, std::size_t) {}
bool populate(std::uint8_t*, std::int64_t, std::int64_t) { return false; }
constexpr bool kPopulates = false;
#else
/// With pages of 64 KB a huge page has 512 MB, which the first write would clear in the middle of a step.
constexpr long kMostPageBytes = 1 << 14;

void ask_for_huge_pages(void* mapping, std::size_t num_bytes) {
    if (sysconf(_SC_PAGESIZE) > kMostPageBytes) return;
    madvise(mapping, num_bytes, MADV_HUGEPAGE);  // only advice: kernels without huge pages refuse it
}

constexpr bool kPopulates = true;
constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, since Linux 5.14

bool populate(std::uint8_t* mapping, std::int64_t first_byte, std::int64_t end_byte) {
    const std::int64_t page_bytes = sysconf(_SC_PAGESIZE);
    const std::int64_t first_page = first_byte / page_bytes * page_bytes;
    return madvise(mapping + first_page, std::size_t(end_byte - first_page), kPopulateWrite) == 0;
}
#endif

}  // namespace

Arena::Arena(std::int64_t num_bytes) : num_bytes_(std::max<std::int64_t>(num_bytes, 1)) {
    void* mapping = mmap(nullptr, std::size_t(num_bytes_), PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) throw std::bad_alloc();
    ask_for_huge_pages(mapping, std::size_t(num_bytes_));
    data_ = static_cast<std::uint8_t*>(mapping);
}

bool Arena::commit(std::int64_t first_byte, std::int64_t num_bytes) const {
    return populate(data_, first_byte, std::min(first_byte + num_bytes, num_bytes_));
}

bool Arena::can_commit() { return kPopulates; }

Arena::~Arena() { munmap(data_, std::size_t(num_bytes_)); }

}  // namespace rworker
