#include "rworker/kernel_choice.hpp"

#include <cstdlib>

#include "rworker/types.hpp"

namespace rworker {

std::vector<const Kernels*> supported_kernels() {
    std::vector<const Kernels*> kernels{&kScalarKernels};
#if defined(RWORKER_AVX2)
    if (__builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0 &&
        __builtin_cpu_supports("f16c") != 0)
        kernels.push_back(&kAvx2Kernels);
#endif
#if defined(RWORKER_AVX512)
    if (__builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
        __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512vl") != 0 &&
        __builtin_cpu_supports("fma") != 0 && __builtin_cpu_supports("f16c") != 0)
        kernels.push_back(&kAvx512Kernels);
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
