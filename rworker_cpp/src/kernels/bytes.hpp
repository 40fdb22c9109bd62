// Products of codes and bytes, four at once, in a generic body: scores of queries, and weighted values.
#pragma once

#include "kernels/byte_factors.hpp"

namespace {

/// Codes in a line for each of its lanes: four, or twice four. Keys are multiplied by signed queries, and values by
/// unsigned weights.
template <class L, DType D>
struct CodeLine;

template <class L>
struct CodeLine<L, DType::int8> {
    static constexpr int parts = 1;
    typename L::ivec part[parts];
    static CodeLine of_keys(const uint8_t* line, const uint8_t*, int) { return {L::load_int(line)}; }
    static CodeLine of_values(const uint8_t* line) { return {L::signed_codes(L::load_int(line))}; }
};

template <class L>
struct CodeLine<L, DType::int4> {
    static constexpr int parts = 2;
    typename L::ivec part[parts];
    static CodeLine of_keys(const uint8_t* line, const uint8_t* bits, int number) {
        return {key_codes<L, 0>(line, bits, number), key_codes<L, 1>(line, bits, number)};
    }
    static CodeLine of_values(const uint8_t* line) {
        const auto pairs = L::load_int(line);
        return {L::signed_low_nibbles(pairs), L::signed_high_nibbles(pairs)};
    }
};

/// Products of unsigned key codes and queries.
template <class L>
struct KeyProducts {
    using ivec = typename L::ivec;
    static ivec add(ivec sum, ivec codes, ivec factors) { return L::add_byte_products(sum, codes, factors); }
    static ivec add(ivec sum, ivec low, ivec low_factors, ivec high, ivec high_factors) {
        return L::add_byte_products(sum, low, low_factors, high, high_factors);
    }
};

/// Products of value codes and unsigned weights.
template <class L>
struct ValueProducts {
    using ivec = typename L::ivec;
    static ivec add(ivec sum, ivec codes, ivec factors) { return L::add_byte_products(sum, factors, codes); }
    static ivec add(ivec sum, ivec low, ivec low_factors, ivec high, ivec high_factors) {
        return L::add_byte_products(sum, low_factors, low, high_factors, high);
    }
};

/// Sums of products of Rows x Vectors lanes. One factor has a sign: the queries, or the codes of values.
template <class L, int Rows, int Vectors>
struct ByteSums {
    typename L::ivec sum[Rows][Vectors];

    template <class Start>
    [[gnu::always_inline]] explicit ByteSums(Start start) {
        RWORKER_UNROLL
        for (int r = 0; r < Rows; ++r) {
            RWORKER_UNROLL
            for (int v = 0; v < Vectors; ++v) {
                sum[r][v] = start(r);
            }
        }
    }

    /// codes(v) gives a CodeLine, factors(r, part) the bytes for its parts. Products::add(sum, codes, factors) adds the
    /// products of one part, or of both parts at once. With few rows the factors stay in registers, with many rows the
    /// line does.
    template <class Products, class Codes, class Factors>
    [[gnu::always_inline]] void add(Codes codes, Factors factors) {
        if constexpr (L::joins_parts)
            add_joined<Products>(codes, factors);
        else
            add_parts(codes, factors, [](auto... terms) { return Products::add(terms...); });
    }

  private:
    template <class Products, class Codes, class Factors>
    [[gnu::always_inline]] void add_joined(Codes codes, Factors factors) {
        using Line = decltype(codes(0));
        constexpr int kept = Rows < Vectors ? 1 : Vectors;
        RWORKER_UNROLL
        for (int first = 0; first < Vectors; first += kept) {
            Line lines[kept];
            RWORKER_UNROLL
            for (int v = 0; v < kept; ++v) lines[v] = codes(first + v);
            RWORKER_UNROLL
            for (int r = 0; r < Rows; ++r) {
                const auto low = L::broadcast_int(factors(r, 0)), high = L::broadcast_int(factors(r, 1));
                RWORKER_UNROLL
                for (int v = 0; v < kept; ++v) {
                    auto& to = sum[r][first + v];
                    to = Products::add(to, lines[v].part[0], low, lines[v].part[1], high);
                }
            }
        }
    }

    template <class Codes, class Factors, class Add>
    [[gnu::always_inline]] void add_parts(Codes codes, Factors factors, Add add_products) {
        using Line = decltype(codes(0));
        if constexpr (Rows < Vectors) {
            RWORKER_UNROLL
            for (int v = 0; v < Vectors; ++v) {
                const Line line = codes(v);
                RWORKER_UNROLL
                for (int part = 0; part < Line::parts; ++part) {
                    RWORKER_UNROLL
                    for (int r = 0; r < Rows; ++r) {
                        const auto factor = L::broadcast_int(factors(r, part));
                        sum[r][v] = add_products(sum[r][v], line.part[part], factor);
                    }
                }
            }
        } else {
            typename L::ivec lines[Line::parts][Vectors];
            RWORKER_UNROLL
            for (int v = 0; v < Vectors; ++v) {
                const Line line = codes(v);
                RWORKER_UNROLL
                for (int part = 0; part < Line::parts; ++part) {
                    lines[part][v] = line.part[part];
                }
            }
            RWORKER_UNROLL
            for (int part = 0; part < Line::parts; ++part) {
                RWORKER_UNROLL
                for (int r = 0; r < Rows; ++r) {
                    const auto factor = L::broadcast_int(factors(r, part));
                    RWORKER_UNROLL
                    for (int v = 0; v < Vectors; ++v) {
                        sum[r][v] = add_products(sum[r][v], lines[part][v], factor);
                    }
                }
            }
        }
    }
};

/// Turns the products of a group of dims (of int8: all dims) into scores; int4 adds them up over the groups.
template <class L, DType D, bool First, int Rows, int Vectors>
[[gnu::always_inline]] inline void finish_scores(const KeyLines<L, Vectors>& keys, int group, const uint32_t* terms,
                                                 const ByteSums<L, Rows, Vectors>& sums, float* scores) {
    RWORKER_UNROLL
    for (int v = 0; v < Vectors; ++v) {
        const uint8_t* const header = keys.vector(v) + group * kHeaderLineBytes;
        const uint32_t* const pairs = reinterpret_cast<const uint32_t*>(header);
        const auto scale = load_scale<L, D>(header), zero = L::load_pair_high(pairs);
        RWORKER_UNROLL
        for (int r = 0; r < Rows; ++r) {
            float* const to = scores + r * chunk_tokens<L, D> + v * L::width;
            const auto products = L::to_float(sums.sum[r][v]);
            if constexpr (D == DType::int8) {
                L::store(to, L::mul(products, scale));
            } else {
                auto score = L::mul(zero, L::set1(float_of(terms[r])));
                if constexpr (!First) score = L::fma(zero, L::set1(float_of(terms[r])), L::load(to));
                L::store(to, L::fma(scale, products, score));
            }
        }
    }
}

/// Computes scores, which must still be multiplied by each row's scale.
template <class L, DType D, int Rows, int Vectors>
[[gnu::noinline]] void score_bytes(const Tile* tiles, int first, const uint32_t* queries, int lines, Ahead& shared,
                                   float* scores) {
    constexpr int line_words = Stored<L, D>::pack / 4 * Rows;
    const int group_lines = D == DType::int8 ? lines : kGroupDims / Stored<L, D>::pack;
    const int groups = (lines + group_lines - 1) / group_lines;
    const int fifth_lines = D == DType::int8 ? 0 : (lines + kFifthBitLines - 1) / kFifthBitLines;
    const KeyLines<L, Vectors> keys(tiles, first);
    Ahead ahead = shared;  // a copy that stays in registers
    for (int group = 0; group < groups; ++group) {
        const uint32_t* const terms = queries;
        ByteSums<L, Rows, Vectors> sums([&](int r) {
            if constexpr (D == DType::int8) return L::broadcast_int(terms + r);
            if constexpr (D == DType::int4) return L::zero_int();
        });
        ahead.ask<keys.num_tiles * kHeaderLineBytes>();
        queries += Rows;
        const int begin = group * group_lines, end = begin + group_lines < lines ? begin + group_lines : lines;
        for (int line = begin; line < end; ++line, queries += line_words) {
            ahead.ask<keys.num_tiles * kHeaderLineBytes>();
            if (D == DType::int4 && line % kFifthBitLines == 0) ahead.ask<keys.num_tiles * kHeaderLineBytes>();
            const int place = (groups + fifth_lines + line) * kHeaderLineBytes;
            const int fifth = (groups + line / kFifthBitLines) * kHeaderLineBytes;
            sums.template add<KeyProducts<L>>(
                [&](int v) { return CodeLine<L, D>::of_keys(keys.vector(v) + place, keys.vector(v) + fifth, line); },
                [&](int r, int part) { return queries + part * Rows + r; });
        }
        if (group == 0)
            finish_scores<L, D, true>(keys, 0, terms, sums, scores + first * L::width);
        else
            finish_scores<L, D, false>(keys, group, terms, sums, scores + first * L::width);
    }
    shared = ahead;
}

/// Computes scores of `Rows` queries with the tokens of a chunk whose tiles have a token in `seen`.
template <class L, DType D, int Rows>
void score_byte_rows(const Tile* tiles, Range seen, Ahead& ahead, const uint32_t* queries, int lines, float* scores) {
    constexpr int together = vectors_together<L, DType::int8, Rows>(4);
    int vector = seen.begin / kTileTokens * (kTileTokens / L::width);
    const int end = (seen.end + L::width - 1) / L::width;
    for (; vector + together <= end; vector += together)
        score_bytes<L, D, Rows, together>(tiles, vector, queries, lines, ahead, scores);
    for (; vector < end; ++vector) score_bytes<L, D, Rows, 1>(tiles, vector, queries, lines, ahead, scores);
}

template <class L, DType D, int Rows, int Vectors>
[[gnu::noinline]] void add_byte_values(const Tile* tiles, Range tokens, const ByteWeights<Rows>& weights,
                                       const float* keep, int lane, float* const* outputs, int padded_dim,
                                       Ahead& ahead) {
    ByteSums<L, Rows, Vectors> sums([](int) { return L::zero_int(); });
    for_value_lines<Stored<L, D>::pack, Vectors * L::width * 4>(
        tiles, tokens, header_bytes<D>(padded_dim), lane, padded_dim, ahead, [&](int token, const uint8_t* line) {
            sums.template add<ValueProducts<L>>([&](int v) { return CodeLine<L, D>::of_values(line + v * L::width * 4); },
                                                [&](int r, int part) { return weights.bytes[r] + token + part * 4; });
        });
    RWORKER_UNROLL
    for (int r = 0; r < Rows; ++r) {
        RWORKER_UNROLL
        for (int v = 0; v < Vectors; ++v) {
            renew<L>(outputs[r] + lane + v * L::width, sums.sum[r][v], weights.scale[r], weights.constant[r], keep[r]);
        }
    }
}

/// output = output * keep + weights x values over the tokens in `seen`.
template <class L, DType D, int Rows>
void add_byte_value_rows(const Tile* tiles, Range seen, Ahead& ahead, const float* weights, const float* keep,
                         float* const* outputs, int padded_dim) {
    const Range tokens = whole_tiles(seen);
    const int group_dims = D == DType::int8 ? padded_dim : kGroupDims;
    for (int first = 0; first < padded_dim; first += group_dims) {
        const int end = first + group_dims < padded_dim ? first + group_dims : padded_dim;
        ByteWeights<Rows> shrunk;
        with_constant_range<chunk_tokens<L, D>>(tokens, [&](Range range) __attribute__((always_inline)) {
            shrink_weights<L, D>(tiles, range, first / group_dims, weights, shrunk);
        });
        ahead.ask<chunk_tokens<L, D> / kTileTokens * kHeaderLineBytes>();
        for_lanes<L, DType::int8, Rows>(first, end, [&]<int Vectors>(int lane) {
            add_byte_values<L, D, Rows, Vectors>(tiles, tokens, shrunk, keep, lane, outputs, padded_dim, ahead);
        });
    }
}

}  // namespace
