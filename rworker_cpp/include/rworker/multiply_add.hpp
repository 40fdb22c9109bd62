// Multiply-adds and nothing else: the arithmetic ceiling of an instruction set.
#pragma once

#include <stdint.h>

namespace rworker {

/// Kernels multiply floats (caches of float32, float16 and bfloat16), or 8- and 4-bit integers as 16-bit ones.
enum class MultiplyAddKind : int { float32 = 0, integer = 1 };

constexpr int64_t kMultiplyAddGranule = 384;  // a whole number of rounds of every loop

/// One instruction set's fastest loops, by kind; each does `count` multiply-adds, a multiple of the granule. The sum
/// they return only keeps them from being optimised away.
struct MultiplyAdds {
    const char* isa;
    float (*run[2])(int64_t count);
};

extern const MultiplyAdds kScalarMultiplyAdds;
extern const MultiplyAdds kAvx2MultiplyAdds;
extern const MultiplyAdds kAvx512MultiplyAdds;

}  // namespace rworker
