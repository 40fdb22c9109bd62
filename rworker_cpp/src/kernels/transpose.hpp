// Keys of one tile from rows of tokens to lanes of tokens.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "rworker/kernels.hpp"

namespace {

using rworker::kTileTokens;

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define RWORKER_SHUFFLES
#endif
#endif

#ifdef RWORKER_SHUFFLES
using Quad = uint32_t __attribute__((vector_size(16)));

/// It copies, since words need not be aligned to 16 bytes; clang accepts no such attribute on `Quad`.
inline Quad load_quad(const uint32_t* words) {
    Quad quad;
    __builtin_memcpy(&quad, words, sizeof(quad));
    return quad;
}

inline void store_quad(uint32_t* words, Quad quad) { __builtin_memcpy(words, &quad, sizeof(quad)); }

/// 4 x 4 words: four rows become four lanes of four lines, which lie 16 words apart.
inline void transpose_square(const uint32_t* const (&rows)[4], uint32_t* out) {
    const Quad a = load_quad(rows[0]), b = load_quad(rows[1]), c = load_quad(rows[2]), d = load_quad(rows[3]);
    const Quad ab_low = __builtin_shufflevector(a, b, 0, 4, 1, 5), ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
    const Quad cd_low = __builtin_shufflevector(c, d, 0, 4, 1, 5), cd_high = __builtin_shufflevector(c, d, 2, 6, 3, 7);
    store_quad(out, __builtin_shufflevector(ab_low, cd_low, 0, 1, 4, 5));
    store_quad(out + kTileTokens, __builtin_shufflevector(ab_low, cd_low, 2, 3, 6, 7));
    store_quad(out + 2 * kTileTokens, __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5));
    store_quad(out + 3 * kTileTokens, __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7));
}
#endif

template <class Word>
inline void transpose_square(const Word* const (&rows)[4], Word* out) {
    for (int line = 0; line < 4; ++line)
        for (int token = 0; token < 4; ++token) out[line * kTileTokens + token] = rows[token][line];
}

/// out[line][token] = rows[token][line] for `tokens` rows of `lines` words. Other lanes are undefined.
template <class Word>
inline void rows_to_lanes(const Word* rows, int tokens, int lines, Word* out) {
    for (int first = 0; first < tokens; first += 4) {
        const Word* row[4];
        for (int i = 0; i < 4; ++i) row[i] = rows + (first + i < tokens ? first + i : tokens - 1) * lines;
        int line = 0;
        for (; line + 4 <= lines; line += 4) {
            const Word* const square[4] = {row[0] + line, row[1] + line, row[2] + line, row[3] + line};
            transpose_square(square, out + line * kTileTokens + first);
        }
        for (; line < lines; ++line)
            for (int i = 0; i < 4; ++i) out[line * kTileTokens + first + i] = row[i][line];
    }
}

}  // namespace
