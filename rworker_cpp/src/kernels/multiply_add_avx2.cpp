#include "kernels/lanes_avx2.hpp"
#include "kernels/multiply_add.hpp"

namespace {

struct Integers {
    using vec = __m256i;
    static constexpr int width = 16;
    static vec set1(int x) { return _mm256_set1_epi16(short(x)); }
    static vec add(vec a, vec b) { return _mm256_add_epi32(a, b); }
    static vec multiply_add(vec a, vec b, vec sum) { return add(_mm256_madd_epi16(a, b), sum); }
    static float first(vec a) { return float(_mm256_cvtsi256_si32(a)); }
};

}  // namespace

namespace rworker {
constexpr MultiplyAdds kAvx2MultiplyAdds{
    "avx2", {multiply_add_floats<Avx2>, multiply_add_floats<Avx2>, multiply_add_integers<Integers>}};
}
