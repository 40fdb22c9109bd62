#include "rworker/kernel_choice.hpp"

#include <cstdlib>
#include <iterator>

#include "rworker/types.hpp"

namespace rworker {
namespace {

#ifdef RWORKER_AVX512
Kernels refined(Kernels kernels, const Refinement& refinement) {
    kernels.isa = refinement.isa;
    for (std::size_t i = 0; i < std::size(refinement.attend); ++i)
        if (refinement.attend[i]) kernels.attend[i] = refinement.attend[i];
    return kernels;
}

void add_avx512(std::vector<const Kernels*>& kernels) {
    static const Kernels vnni_kernels = refined(kAvx512Kernels, kAvx512Vnni);
    static const Kernels bf16_kernels = refined(vnni_kernels, kAvx512Bf16);
    if (__builtin_cpu_supports("avx512f") == 0 || __builtin_cpu_supports("avx512bw") == 0 ||
        __builtin_cpu_supports("avx512dq") == 0 || __builtin_cpu_supports("avx512vl") == 0)
        return;
    kernels.push_back(&kAvx512Kernels);
    if (__builtin_cpu_supports("avx512vnni") == 0) return;
    kernels.push_back(&vnni_kernels);
    if (__builtin_cpu_supports("avx512bf16") != 0) kernels.push_back(&bf16_kernels);
}
#endif

}  // namespace

std::vector<const Kernels*> supported_kernels() {
    std::vector<const Kernels*> kernels{&kScalarKernels};
#ifdef RWORKER_AVX2
    if (__builtin_cpu_supports("avx2") == 0 || __builtin_cpu_supports("fma") == 0 ||
        __builtin_cpu_supports("f16c") == 0)
        return kernels;
    kernels.push_back(&kAvx2Kernels);
#endif
#ifdef RWORKER_AVX512
    add_avx512(kernels);
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

int checked_streams(int streams) {
    if (streams == 1 || streams == kStreams) return streams;
    throw Error("streams is " + std::to_string(streams) + "; it must be 1 or " + std::to_string(kStreams));
}

}  // namespace rworker
