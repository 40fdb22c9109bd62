// Registers as vectors of the compiler, which splits them into what the processor has, and their lanes one by one.
#pragma once

#include <stdint.h>

typedef float __m512 __attribute__((vector_size(64), may_alias));
typedef long long __m512i __attribute__((vector_size(64), may_alias));
typedef uint16_t __m512bh __attribute__((vector_size(64), may_alias));
typedef long long __m256i __attribute__((vector_size(32), may_alias));
typedef uint16_t __mmask16;

// Nothing of this may be a symbol that the linker could share with other files.
#define RWORKER_INTRINSIC [[gnu::always_inline]] static inline

namespace emulation {

// Unsigned, since sums of registers wrap around.
typedef uint8_t u8x64 __attribute__((vector_size(64), may_alias));
typedef uint16_t u16x32 __attribute__((vector_size(64), may_alias));
typedef uint32_t u32x16 __attribute__((vector_size(64), may_alias));
typedef uint64_t u64x8 __attribute__((vector_size(64), may_alias));

/// The lanes of a register as an array: loops over arrays are what compilers vectorise.
template <class Lane, int Bytes = 64>
struct Lanes {
    alignas(Bytes) Lane lane[Bytes / sizeof(Lane)];

    Lanes() = default;
    template <class Vector>
    [[gnu::always_inline]] explicit Lanes(const Vector& vector) {
        static_assert(sizeof(Vector) == Bytes);
        __builtin_memcpy(lane, &vector, Bytes);
    }
    template <class Vector>
    [[gnu::always_inline]] operator Vector() const {
        Vector vector;
        static_assert(sizeof(Vector) == Bytes);
        __builtin_memcpy(&vector, lane, Bytes);
        return vector;
    }
    [[gnu::always_inline]] Lane& operator[](int i) { return lane[i]; }
    [[gnu::always_inline]] const Lane& operator[](int i) const { return lane[i]; }
};

/// a * b + c, each lane rounded once.
RWORKER_INTRINSIC __m512 fused(__m512 a, __m512 b, __m512 c) {
#ifdef __FMA__
    typedef float f32x8 __attribute__((vector_size(32)));
    struct Halves {
        f32x8 low, high;
    };
    const Halves x = __builtin_bit_cast(Halves, a), y = __builtin_bit_cast(Halves, b), z = __builtin_bit_cast(Halves, c);
    const Halves sum{__builtin_ia32_vfmaddps256(x.low, y.low, z.low), __builtin_ia32_vfmaddps256(x.high, y.high, z.high)};
    return __builtin_bit_cast(__m512, sum);
#else
    const Lanes<float> x(a), y(b), z(c);
    Lanes<float> sum;
    for (int i = 0; i < 16; ++i) sum[i] = __builtin_fmaf(x[i], y[i], z[i]);
    return sum;
#endif
}

RWORKER_INTRINSIC uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
RWORKER_INTRINSIC float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

}  // namespace emulation
