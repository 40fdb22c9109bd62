#include "rworker/kernel_choice.hpp"

#include <cstdlib>
#include <iterator>

#include "rworker/types.hpp"
#include "tile_permission.hpp"

#ifdef RWORKER_AVX2
#include <cpuid.h>
#endif
#if defined(RWORKER_NEON) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(RWORKER_NEON) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#ifdef RWORKER_EMULATED
#define CPU_HAS(feature) true
#else
#define CPU_HAS(feature) (__builtin_cpu_supports(feature) != 0)
#endif

namespace rworker {
namespace {

#if defined(RWORKER_AVX2) || defined(RWORKER_AVX512) || defined(RWORKER_NEON)
Kernels refined(Kernels kernels, const Refinement& refinement) {
    kernels.isa = refinement.isa;
    for (std::size_t i = 0; i < std::size(refinement.attend); ++i)
        if (refinement.attend[i]) kernels.attend[i] = refinement.attend[i];
    for (std::size_t i = 0; i < std::size(refinement.score); ++i)
        if (refinement.score[i]) kernels.score[i] = refinement.score[i];
    if (refinement.release) kernels.release = refinement.release;
    return kernels;
}
#endif

#ifdef RWORKER_AVX512
void add_avx512(std::vector<const Kernels*>& kernels) {
    static const Kernels vnni_kernels = refined(refined(kAvx512Kernels, kAvx512Vnni), kAvx512VnniBytes);
    static const Kernels bf16_kernels = refined(vnni_kernels, kAvx512Bf16);
    if (!CPU_HAS("avx512f") || !CPU_HAS("avx512bw") || !CPU_HAS("avx512dq") || !CPU_HAS("avx512vl")) return;
    kernels.push_back(&kAvx512Kernels);
    if (!CPU_HAS("avx512vnni")) return;
    kernels.push_back(&vnni_kernels);
    if (!CPU_HAS("avx512bf16")) return;
    kernels.push_back(&bf16_kernels);
    static const Kernels amx_kernels = refined(bf16_kernels, kAvx512Amx);
    if (tiles_granted()) kernels.push_back(&amx_kernels);
}
#endif

#ifdef RWORKER_AVX2
/// Clang's __builtin_cpu_supports does not know it.
bool has_f16c() {
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
#endif

#ifdef RWORKER_NEON
struct NeonFeatures {
    bool dot = false, bf16 = false;  // bf16: with products of float16, and of bytes of which one has a sign
};

#if defined(__linux__)
NeonFeatures neon_features() {
    const unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
    constexpr unsigned long bf16 = HWCAP2_BF16 | HWCAP2_I8MM;
    return {(first & HWCAP_ASIMDDP) != 0, (second & bf16) == bf16 && (first & HWCAP_ASIMDFHM) != 0};
}
#elif defined(__APPLE__)
bool has_feature(const char* name) {
    int value = 0;
    std::size_t size = sizeof(value);
    return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}

NeonFeatures neon_features() {
    return {has_feature("hw.optional.arm.FEAT_DotProd"),
            has_feature("hw.optional.arm.FEAT_BF16") && has_feature("hw.optional.arm.FEAT_I8MM") &&
                has_feature("hw.optional.arm.FEAT_FHM")};
}
#else
NeonFeatures neon_features() { return {}; }
#endif

void add_neon(std::vector<const Kernels*>& kernels) {
    static const Kernels dot_kernels = refined(kNeonKernels, kNeonDot);
    static const Kernels bf16_kernels = refined(dot_kernels, kNeonBf16);
    const NeonFeatures features = neon_features();
    kernels.push_back(&kNeonKernels);
    if (!features.dot) return;
    kernels.push_back(&dot_kernels);
    if (features.bf16) kernels.push_back(&bf16_kernels);
}
#endif

}  // namespace

std::vector<const Kernels*> supported_kernels() {
    std::vector<const Kernels*> kernels{&kScalarKernels};
#ifdef RWORKER_AVX2
    if (!CPU_HAS("avx2") || !CPU_HAS("fma") || !has_f16c()) return kernels;
    static const Kernels avx2_kernels = refined(kAvx2Kernels, kAvx2Bytes);
    kernels.push_back(&avx2_kernels);
#endif
#ifdef RWORKER_AVX512
    add_avx512(kernels);
#endif
#ifdef RWORKER_NEON
    add_neon(kernels);
#endif
    return kernels;
}

const Kernels& choose_kernels(const std::string& isa) {
    const char* forced = isa == "auto" ? std::getenv("FASTDECODE_ISA") : nullptr;
    const std::string wanted = forced && *forced ? forced : isa;
    const std::vector<const Kernels*> supported = supported_kernels();
    if (wanted == "auto") return *supported.back();
    std::string names;
    for (const Kernels* kernels : supported) {
        if (wanted == kernels->isa) return *kernels;
        names += names.empty() ? kernels->isa : std::string(", ") + kernels->isa;
    }
    throw Error((wanted == isa ? "isa" : "FASTDECODE_ISA") + std::string(" is '") + wanted +
                "'; this machine supports " + names);
}

ReadAhead parse_read_ahead(const std::string& name) {
    if (name == "run") return ReadAhead::run;
    if (name == "run-l2") return ReadAhead::run_l2;
    if (name == "pages") return ReadAhead::pages;
    throw Error("read_ahead is '" + name + "'; it must be run, run-l2 or pages");
}

}  // namespace rworker
