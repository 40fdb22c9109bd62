#include "tile_permission.hpp"

#include <cstdint>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace rworker {
namespace {

#if defined(__x86_64__) && defined(__linux__)
constexpr unsigned kBfloat16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25;  // leaf 7, EDX
constexpr unsigned kXsaveInUse = 1u << 27;                                    // leaf 1, ECX
constexpr unsigned kTileState = 3u << 17;                                     // XCR0: configuration and data
constexpr long kRequestPermission = 0x1023, kTileData = 18;                   // ARCH_REQ_XCOMP_PERM (Linux 5.16)

bool processor_has_tiles() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    constexpr unsigned wanted = kBfloat16 | kTile | kInt8;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & wanted) == wanted;
}

/// A hypervisor may offer the instructions and still not save their state.
bool state_is_kept() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & kXsaveInUse) == 0) return false;
    unsigned low = 0, high = 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & kTileState) == kTileState;
}

/// The kernel refuses if it is too old, or if a thread's signal stack is too small for the registers.
bool kernel_permits() { return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0; }

bool ask() { return processor_has_tiles() && state_is_kept() && kernel_permits(); }
#else
bool ask() { return false; }
#endif

}  // namespace

bool tiles_granted() {
    static const bool granted = ask();
    return granted;
}

}  // namespace rworker
