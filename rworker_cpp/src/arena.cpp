#include "rworker/arena.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <new>

namespace rworker {
namespace {

#ifdef RWORKER_PORTABLE
void ask_for_huge_pages(void*, std::size_t) {}
#else
/// A huge page of pages of 64 KB has 512 MB, which its first touch would clear in the middle of a step.
constexpr long kMostPageBytes = 1 << 14;

void ask_for_huge_pages(void* mapping, std::size_t num_bytes) {
    if (sysconf(_SC_PAGESIZE) > kMostPageBytes) return;
    madvise(mapping, num_bytes, MADV_HUGEPAGE);  // a wish: kernels without huge pages refuse it
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

Arena::~Arena() { munmap(data_, std::size_t(num_bytes_)); }

}  // namespace rworker
