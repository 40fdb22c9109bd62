// Stands before the compiler's own header: its AVX-512, and tiles that are emulated.
#pragma once

#include_next <immintrin.h>

#include "../tiles.hpp"
