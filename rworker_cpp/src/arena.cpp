#include "rworker/arena.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <new>

namespace rworker {

Arena::Arena(std::int64_t num_bytes) : num_bytes_(std::max<std::int64_t>(num_bytes, 1)) {
    void* mapping = mmap(nullptr, std::size_t(num_bytes_), PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) throw std::bad_alloc();
    madvise(mapping, std::size_t(num_bytes_), MADV_HUGEPAGE);  // a wish: kernels without huge pages refuse it
    data_ = static_cast<std::uint8_t*>(mapping);
}

Arena::~Arena() { munmap(data_, std::size_t(num_bytes_)); }

}  // namespace rworker
