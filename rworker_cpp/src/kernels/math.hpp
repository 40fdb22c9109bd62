// exp and tanh over any Lanes, the same operations on every instruction set.
#pragma once

namespace {

constexpr float kInfinity = __builtin_inff();

/// e^x for x <= 0, within 2 ulp; exactly 1 at 0, exactly 0 below -87, NaN for NaN.
template <class L>
inline typename L::vec exp_nonpositive(typename L::vec x) {
    using vec = typename L::vec;
    const vec round = L::set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer kept in the low bits
    const vec bounded = L::max(L::set1(-88.0f), x);
    const vec shifted = L::fma(bounded, L::set1(1.44269504088896341f), round);
    const vec n = L::sub(shifted, round);
    const vec r = L::fma(n, L::set1(2.12194440e-4f), L::fma(n, L::set1(-0.693359375f), bounded));
    vec p = L::set1(1.9875691500e-4f);
    p = L::fma(p, r, L::set1(1.3981999507e-3f));
    p = L::fma(p, r, L::set1(8.3334519073e-3f));
    p = L::fma(p, r, L::set1(4.1665795894e-2f));
    p = L::fma(p, r, L::set1(1.6666665459e-1f));
    p = L::fma(p, r, L::set1(5.0000001201e-1f));
    p = L::add(L::fma(p, L::mul(r, r), r), L::set1(1.0f));
    return L::if_less(x, L::set1(-87.0f), L::set1(0.0f), L::mul(p, L::power_of_two(shifted)));
}

/// tanh x, accurate near 0 as well, where 1 - e^-2x would cancel.
template <class L>
inline typename L::vec tanh(typename L::vec x) {
    using vec = typename L::vec;
    const vec magnitude = L::abs(x), square = L::mul(x, x);
    vec p = L::set1(-5.70498872745e-3f);
    p = L::fma(p, square, L::set1(2.06390887954e-2f));
    p = L::fma(p, square, L::set1(-5.37397155531e-2f));
    p = L::fma(p, square, L::set1(1.33314422036e-1f));
    p = L::fma(p, square, L::set1(-3.33332819422e-1f));
    const vec small = L::fma(L::mul(p, square), x, x);
    const vec e = exp_nonpositive<L>(L::mul(magnitude, L::set1(-2.0f)));
    const vec one = L::set1(1.0f);
    const vec large = L::copy_sign(L::div(L::sub(one, e), L::add(one, e)), x);
    return L::if_less(magnitude, L::set1(0.625f), small, large);
}

template <class L>
inline float exp_nonpositive_one(float x) {
    return L::first(exp_nonpositive<L>(L::set1(x)));
}

}  // namespace
