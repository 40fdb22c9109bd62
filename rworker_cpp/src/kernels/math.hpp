// exp and tanh over any Lanes, with the same operations on every instruction set.
#pragma once

#include "kernels/rows.hpp"

namespace {

constexpr float kInfinity = __builtin_inff();
constexpr float kLog2E = 1.44269504088896341f, kLn2 = 0.693147180559945309f;

/// e^x for each x <= 0, with an error below 4e-7; exactly 1 at 0, exactly 0 below -87, NaN for NaN. Several vectors are
/// computed at once, since one alone would wait for its own results.
template <class L, int N>
[[gnu::always_inline]] inline void exp_nonpositive(typename L::vec (&x)[N]) {
    using vec = typename L::vec;
    constexpr float factors[] = {4.189816117286682e-2f, 1.666763871908188e-1f, 4.999914765357971e-1f,
                                 9.999997019767761e-1f, 1.0f};
    const vec round = L::set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer kept in the low bits
    vec shifted[N], r[N], p[N];
    RWORKER_UNROLL
    for (int i = 0; i < N; ++i) shifted[i] = L::fma(x[i], L::set1(1.44269504088896341f), round);
    RWORKER_UNROLL
    for (int i = 0; i < N; ++i) r[i] = L::fma(L::sub(shifted[i], round), L::set1(-0.693147180559945309f), x[i]);
    RWORKER_UNROLL
    for (int i = 0; i < N; ++i) p[i] = L::set1(8.290272206068039e-3f);
    RWORKER_UNROLL
    for (const float factor : factors) {
        RWORKER_UNROLL
        for (int i = 0; i < N; ++i) p[i] = L::fma(p[i], r[i], L::set1(factor));
    }
    RWORKER_UNROLL
    for (int i = 0; i < N; ++i)  // below -87, p is arbitrary
        x[i] = L::if_less(x[i], L::set1(-87.0f), L::set1(0.0f), L::mul(p[i], L::power_of_two(shifted[i])));
}

template <class L>
inline typename L::vec exp_nonpositive_one(typename L::vec x) {
    typename L::vec one[] = {x};
    exp_nonpositive<L>(one);
    return one[0];
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
    const vec e = exp_nonpositive_one<L>(L::mul(magnitude, L::set1(-2.0f)));
    const vec one = L::set1(1.0f);
    const vec large = L::copy_sign(L::div(L::sub(one, e), L::add(one, e)), x);
    return L::if_less(magnitude, L::set1(0.625f), small, large);
}

template <class L>
inline float exp_of_nonpositive(float x) {
    return L::first(exp_nonpositive_one<L>(L::set1(x)));
}

}  // namespace
