// Loops of multiply-adds only: they measure the peak arithmetic of an instruction set.
#pragma once

#include <stdint.h>

namespace rworker {

/// Operands that a cache's kernels multiply: floats (also for float16), bfloat16 pairs where the CPU can, or integers.
enum class MultiplyAddKind : int { float32 = 0, bfloat16 = 1, integer = 2 };

constexpr int64_t kMultiplyAddGranule = 3 << 16;  // a whole number of iterations of every loop

/// One instruction set's fastest loops, by kind; null where it has none of its own. Each does `count` multiply-adds, a
/// multiple of the granule. Their sum is returned only so that the compiler keeps the loops.
struct MultiplyAdds {
    const char* isa;
    float (*run[3])(int64_t count);
};

extern const MultiplyAdds kScalarMultiplyAdds;
extern const MultiplyAdds kAvx2MultiplyAdds;
extern const MultiplyAdds kAvx512MultiplyAdds;
extern const MultiplyAdds kAvx512VnniMultiplyAdds;
extern const MultiplyAdds kAvx512Bf16MultiplyAdds;
extern const MultiplyAdds kAvx512AmxMultiplyAdds;
extern const MultiplyAdds kNeonMultiplyAdds;
extern const MultiplyAdds kNeonDotMultiplyAdds;
extern const MultiplyAdds kNeonBf16MultiplyAdds;

}  // namespace rworker
