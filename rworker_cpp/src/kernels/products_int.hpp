// The two products of attention over int8 and int4 codes. Sums over dims (of a group) and over the tokens of a chunk
// are integers, so they are exact. Only the additions from one group or chunk to the next depend on an order, and it is
// fixed.
#pragma once

#include "kernels/factors.hpp"

namespace {

/// Vectors of one row group that fit the registers together: a power of two, at least 1.
template <class L, DType D, int Rows>
constexpr int vectors_together(int most) {
    const int fit = L::code_sums / (Rows * (D == DType::int8 ? 1 : 2));  // int4 sums come in two halves
    int vectors = most;
    while (vectors > 1 && vectors > fit) vectors /= 2;
    return vectors;
}

/// Sums of products of Rows x Vectors lanes; `add` adds one line of 4-byte lanes to all of them.
template <class L, DType D, int Rows, int Vectors>
struct Sums;

/// int8: a line's factors are two words of int16 pairs per row.
template <class L, int Rows, int Vectors>
struct Sums<L, DType::int8, Rows, Vectors> {
    typename L::ivec sum[Rows][Vectors];

    /// Lines are at address(v), factors at factors(r), as bytes. With few rows, factors stay in registers and lines are
    /// split one by one; with many rows, the split lines stay.
    template <class Address, class Factors>
    [[gnu::always_inline]] void add(Address address, Factors factors) {
        if constexpr (Rows < Vectors) {
            RWORKER_UNROLL
            for (int v = 0; v < Vectors; ++v) {
                const auto line = L::load_int(address(v));
                const auto even = L::even_bytes(line), odd = L::odd_bytes(line);
                RWORKER_UNROLL
                for (int r = 0; r < Rows; ++r) {
                    sum[r][v] = L::add_pair_products(sum[r][v], even, L::broadcast_int(factors(r)));
                    sum[r][v] = L::add_pair_products(sum[r][v], odd, L::broadcast_int(factors(r) + 4));
                }
            }
        } else {
            typename L::ivec even[Vectors], odd[Vectors];
            RWORKER_UNROLL
            for (int v = 0; v < Vectors; ++v) {
                const auto line = L::load_int(address(v));
                even[v] = L::even_bytes(line), odd[v] = L::odd_bytes(line);
            }
            RWORKER_UNROLL
            for (int r = 0; r < Rows; ++r) {
                RWORKER_UNROLL
                for (int v = 0; v < Vectors; ++v) {
                    sum[r][v] = L::add_pair_products(sum[r][v], even[v], L::broadcast_int(factors(r)));
                    sum[r][v] = L::add_pair_products(sum[r][v], odd[v], L::broadcast_int(factors(r) + 4));
                }
            }
        }
    }
};

/// int4: a line's factors are a word of bytes for its low nibbles and one for its high nibbles, in two halves each.
template <class L, int Rows, int Vectors>
struct Sums<L, DType::int4, Rows, Vectors> {
    typename L::ivec high[Rows][Vectors], low[Rows][Vectors];

    [[gnu::always_inline]] void clear() {
        RWORKER_UNROLL
        for (int r = 0; r < Rows; ++r) {
            RWORKER_UNROLL
            for (int v = 0; v < Vectors; ++v) {
                high[r][v] = low[r][v] = L::zero_int();
            }
        }
    }

    /// With few rows, factors stay in registers and lines are split one by one; with many rows, the split lines stay.
    /// codes.operator()<0>(v) are the low nibbles, <1> the high ones.
    template <class Codes, class HighFactors, class LowFactors>
    [[gnu::always_inline]] void add(Codes codes, HighFactors high_factors, LowFactors low_factors) {
        if constexpr (Rows < Vectors) {
            add_half<0>(codes, high_factors, low_factors);
            __asm__ volatile("" ::: "memory");  // loading the lines again is cheaper than keeping them
            add_half<1>(codes, high_factors, low_factors);
        } else {
            add_rows(codes, high_factors, low_factors);
        }
    }

  private:
    template <int Half, class Codes, class HighFactors, class LowFactors>
    [[gnu::always_inline]] void add_half(Codes codes_of, HighFactors high_factors, LowFactors low_factors) {
        RWORKER_UNROLL
        for (int v = 0; v < Vectors; ++v) {
            const auto codes = codes_of.template operator()<Half>(v);
            RWORKER_UNROLL
            for (int r = 0; r < Rows; ++r) {
                high[r][v] = L::add_quad_products(high[r][v], codes, L::broadcast_int(high_factors(r) + Half * 4));
                low[r][v] = L::add_quad_products(low[r][v], codes, L::broadcast_int(low_factors(r) + Half * 4));
            }
        }
    }

    template <class Codes, class HighFactors, class LowFactors>
    [[gnu::always_inline]] void add_rows(Codes codes_of, HighFactors high_factors, LowFactors low_factors) {
        typename L::ivec first[Vectors], second[Vectors];
        RWORKER_UNROLL
        for (int v = 0; v < Vectors; ++v) {
            first[v] = codes_of.template operator()<0>(v), second[v] = codes_of.template operator()<1>(v);
        }
        RWORKER_UNROLL
        for (int r = 0; r < Rows; ++r) {
            RWORKER_UNROLL
            for (int v = 0; v < Vectors; ++v) {
                high[r][v] = L::add_quad_products(high[r][v], first[v], L::broadcast_int(high_factors(r)));
                low[r][v] = L::add_quad_products(low[r][v], first[v], L::broadcast_int(low_factors(r)));
                high[r][v] = L::add_quad_products(high[r][v], second[v], L::broadcast_int(high_factors(r) + 4));
                low[r][v] = L::add_quad_products(low[r][v], second[v], L::broadcast_int(low_factors(r) + 4));
            }
        }
    }
};

}  // namespace
