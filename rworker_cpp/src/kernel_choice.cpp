#include "rworker/kernel_choice.hpp"

#include <cstdlib>
#include <iterator>

#include "rworker/types.hpp"

namespace rworker {
namespace {

[[maybe_unused]] Kernels refined(Kernels kernels, const Refinement& refinement) {
    kernels.isa = refinement.isa;
    for (std::size_t i = 0; i < std::size(refinement.attend); ++i)
        if (refinement.attend[i]) kernels.attend[i] = refinement.attend[i];
    return kernels;
}

}  // namespace

std::vector<const Kernels*> supported_kernels() {
    std::vector<const Kernels*> kernels{&kScalarKernels};
#ifdef RWORKER_X86
    static const Kernels vnni_kernels = refined(kAvx512Kernels, kAvx512Vnni);
    static const Kernels bf16_kernels = refined(vnni_kernels, kAvx512Bf16);
    const bool avx2 = __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0 &&
                      __builtin_cpu_supports("f16c") != 0;
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
                        __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512vl") != 0;
    if (avx2) kernels.push_back(&kAvx2Kernels);
    const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni") != 0;
    const bool bf16 = vnni && __builtin_cpu_supports("avx512bf16") != 0;
    if (avx512) kernels.push_back(&kAvx512Kernels);
    if (vnni) kernels.push_back(&vnni_kernels);
    if (bf16) kernels.push_back(&bf16_kernels);
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

}  // namespace rworker
