#include <immintrin.h>

#include "kernels/multiply_add.hpp"

namespace {

struct Integers {
    using vec = __m512i;
    static constexpr int width = 64;
    static vec set1(int x) { return _mm512_set1_epi8(char(x)); }
    static vec add(vec a, vec b) { return _mm512_add_epi32(a, b); }
    static vec multiply_add(vec a, vec b, vec sum) { return _mm512_dpbusd_epi32(sum, a, b); }
    static float first(vec a) { return float(_mm512_cvtsi512_si32(a)); }
};

}  // namespace

namespace rworker {
constexpr MultiplyAdds kAvx512VnniMultiplyAdds{"avx512_vnni", {nullptr, nullptr, multiply_add_integers<Integers, 12>}};
}
