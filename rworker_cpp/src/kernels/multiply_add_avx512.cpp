#include "kernels/lanes_avx512.hpp"
#include "kernels/multiply_add.hpp"

namespace {

struct Integers {
    using vec = __m512i;
    static constexpr int width = 32;
    static vec set1(int x) { return _mm512_set1_epi16(short(x)); }
    static vec add(vec a, vec b) { return _mm512_add_epi32(a, b); }
    static vec multiply_add(vec a, vec b, vec sum) { return add(_mm512_madd_epi16(a, b), sum); }
    static float first(vec a) { return float(_mm512_cvtsi512_si32(a)); }
};

}  // namespace

namespace rworker {
constexpr MultiplyAdds kAvx512MultiplyAdds{
    "avx512", {multiply_add_floats<Avx512>, multiply_add_floats<Avx512>, multiply_add_integers<Integers>}};
}
