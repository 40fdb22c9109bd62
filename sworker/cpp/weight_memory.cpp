#include "weight_memory.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <new>

namespace sworker {

namespace {

constexpr std::size_t LINE = 64, HUGE_PAGE = std::size_t(1) << 21, LEAST_MAPPING = std::size_t(1) << 25;
/// With larger small pages, a huge page is so large that the first write to it takes too long.
constexpr long MOST_PAGE = 1 << 14;

constexpr std::size_t rounded_up(std::size_t bytes, std::size_t unit) {
    return (bytes + unit - 1) / unit * unit;
}

/// Zeroed memory that begins at a huge page.
class Mapping {
public:
    explicit Mapping(std::size_t size) : size_(size) {
        whole_ = mmap(nullptr, size + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
                      0);
        if (whole_ == MAP_FAILED) throw std::bad_alloc();
        data_ = reinterpret_cast<std::int8_t*>(rounded_up(reinterpret_cast<std::uintptr_t>(whole_), HUGE_PAGE));
#ifdef MADV_HUGEPAGE
        if (sysconf(_SC_PAGESIZE) <= MOST_PAGE) madvise(data_, size, MADV_HUGEPAGE);  // only advice
#endif
    }
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;
    ~Mapping() { munmap(whole_, size_ + HUGE_PAGE); }

    /// The next `bytes` bytes; null if fewer are left.
    std::int8_t* take(std::size_t bytes) {
        if (size_ - used_ < bytes) return nullptr;
        used_ += bytes;
        return data_ + used_ - bytes;
    }

private:
    std::size_t size_, used_ = 0;
    void* whole_;
    std::int8_t* data_;
};

}  // namespace

std::shared_ptr<std::int8_t> weight_memory(std::size_t bytes) {
    static std::mutex mutex;
    static std::weak_ptr<Mapping> latest;
    const std::lock_guard lock(mutex);
    const std::size_t whole = rounded_up(bytes, LINE);
    std::shared_ptr<Mapping> mapping = latest.lock();
    std::int8_t* data = mapping ? mapping->take(whole) : nullptr;
    if (!data) {
        latest = mapping = std::make_shared<Mapping>(std::max(LEAST_MAPPING, rounded_up(whole, HUGE_PAGE)));
        data = mapping->take(whole);
    }
    return {mapping, data};
}

}  // namespace sworker
