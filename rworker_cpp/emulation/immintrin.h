// AVX-512 in plain C++, for tests on machines without it: found in place of the compiler's <immintrin.h>.
//
// What the kernels use and nothing else, bit for bit as processors compute it (rworker_cpp/tests/intrinsics.cpp holds
// each against the real one where there is one); of two NaNs either may come out. Arguments are those of Intel's guide.
// Products of this header must never be installed: they say of any processor that it has all of this.
#pragma once

#include "conversions.hpp"
#include "floats.hpp"
#include "integers.hpp"
#include "shuffles.hpp"
#include "tiles.hpp"
