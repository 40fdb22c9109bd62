// Loops of independent multiply-adds, with enough chains to hide the latency of each.
#pragma once

#include "rworker/multiply_add.hpp"

#define RWORKER_UNROLL _Pragma("GCC unroll 16")

namespace {

#if defined(__aarch64__)
constexpr int kFloatChains = 16;  // four per cycle at a latency of four
#else
constexpr int kFloatChains = 12;  // two per cycle at a latency of five, with registers for the operands
#endif
constexpr int kIntegerChains = 6;  // where only the addition, with a latency of one, is in the chain

/// Makes the compiler assume that `operand` has changed, so that it computes the next product again.
template <class T>
[[gnu::always_inline]] inline void forget(T& operand) {
#if defined(RWORKER_EMULATED)
    asm volatile("" : "+m"(operand));
#elif defined(__x86_64__)
    asm volatile("" : "+x"(operand));
#elif defined(__aarch64__)
    asm volatile("" : "+wr"(operand));
#else
    asm volatile("" : "+g"(operand));
#endif
}

template <class L>
float multiply_add_floats(int64_t count) {
    typename L::vec sum[kFloatChains], x = L::set1(1e-9f), y = L::set1(0.5f);
    for (auto& s : sum) s = L::set1(0.0f);
    for (int64_t done = 0; done < count; done += kFloatChains * L::width) {
        forget(x);
        RWORKER_UNROLL
        for (int i = 0; i < kFloatChains; ++i) {
            sum[i] = L::fma(x, y, sum[i]);
        }
    }
    float total = 0.0f;
    for (const auto& s : sum) total += L::reduce_add(s);
    return total;
}

/// I: vectors of 16-bit integers; `multiply_add` adds products of pairs of them to 32-bit sums.
template <class I, int Chains = kIntegerChains>
float multiply_add_integers(int64_t count) {
    typename I::vec sum[Chains], x = I::set1(3), y = I::set1(5);
    for (auto& s : sum) s = I::set1(0);
    for (int64_t done = 0; done < count; done += Chains * I::width) {
        RWORKER_UNROLL
        for (int i = 0; i < Chains; ++i) {
            forget(x);
            sum[i] = I::multiply_add(x, y, sum[i]);
        }
    }
    for (int i = 1; i < Chains; ++i) sum[0] = I::add(sum[0], sum[i]);
    return I::first(sum[0]);
}

}  // namespace
