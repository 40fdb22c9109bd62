#include <immintrin.h>

#include "kernels/multiply_add.hpp"

namespace {

struct Pairs {
    using vec = __m512i;
    static constexpr int width = 32;
    static vec set1(int x) { return _mm512_set1_epi16(short(x)); }  // bits of a tiny number
    static vec add(vec a, vec b) {
        return _mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b)));
    }
    static vec multiply_add(vec a, vec b, vec sum) {
        return _mm512_castps_si512(_mm512_dpbf16_ps(_mm512_castsi512_ps(sum), (__m512bh)a, (__m512bh)b));
    }
    static float first(vec a) { return _mm512_cvtss_f32(_mm512_castsi512_ps(a)); }
};

}  // namespace

namespace rworker {
constexpr MultiplyAdds kAvx512Bf16MultiplyAdds{"avx512_bf16", {nullptr, multiply_add_integers<Pairs, 12>}};
}
