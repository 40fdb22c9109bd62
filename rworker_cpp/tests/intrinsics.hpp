// Every intrinsic of the AVX-512 kernels over plain bytes, as the compiler's header has it and as the emulation does.
#pragma once

/// One intrinsic: 64 bytes for each operand and for the result, which is padded with zeros.
struct Intrinsic {
    const char* name;
    bool any_nan;  // of several NaNs it may return any: the processor takes the first operand's, and compilers swap them
    void (*run)(const unsigned char (&operands)[3][64], unsigned char (&result)[64]);
};

extern const Intrinsic kRealIntrinsics[], kEmulatedIntrinsics[];  // in the same order
extern const int kNumIntrinsics;
