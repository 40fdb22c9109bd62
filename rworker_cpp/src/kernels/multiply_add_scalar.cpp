#include "kernels/lanes_scalar.hpp"
#include "kernels/multiply_add.hpp"

namespace {

/// Eight products in two instructions where 128-bit vectors are part of the base architecture.
struct Integers {
#if defined(__SSE2__)
    using vec = short __attribute__((vector_size(16)));
    static constexpr int width = 8;
    static vec set1(int x) { return vec{} + short(x); }
    static vec add(vec a, vec b) { return vec((ints)a + (ints)b); }
    static vec multiply_add(vec a, vec b, vec sum) { return add(vec(__builtin_ia32_pmaddwd128(a, b)), sum); }
    static float first(vec a) { return float(((ints)a)[0]); }

  private:
    using ints = int __attribute__((vector_size(16)));
#else
    using vec = int;
    static constexpr int width = 1;
    static vec set1(int x) { return x; }
    static vec add(vec a, vec b) { return a + b; }
    static vec multiply_add(vec a, vec b, vec sum) { return a * b + sum; }
    static float first(vec a) { return float(a); }
#endif
};

}  // namespace

namespace rworker {
constexpr MultiplyAdds kScalarMultiplyAdds{
    "scalar", {multiply_add_floats<Scalar>, multiply_add_floats<Scalar>, multiply_add_integers<Integers>}};
}
