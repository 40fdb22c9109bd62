// A layer that keeps a state of fixed size per sequence, in place of keys and values of each token.
//
// A row of its payload is one token: its channels, elements of the model's dtype, then float32 numbers as their bits.
//   channels   delta, scan, selective: values [heads, value_dim] and, of each group of heads, a key and a query of
//              key_dim, in the order query, key, value (delta) or value, key, query; window, lru: values alone
//   numbers    delta, scan: log of the decay [heads, decays], then the rate [heads]; selective: a step, lru: a decay
//              [heads, value_dim]
// Channels go through a causal convolution of `taps` tokens, each by itself, and SiLU where `silu` says so. With q, k, v
// of a head after it, its matrix S [key_dim, value_dim] and a = exp(log of the decay):
//   delta      S <- a S;  d = rate (v - S'k);  S <- S + k d';  o = scale S'q      q and k of length 1 where `norm`
//   scan       S <- a S + k (rate v)';  o = S'q + skip v
//   window     o = v
// and where each channel c of the values decays by itself:
//   selective  S_nc <- exp(step_c factor_nc) S_nc + k_n step_c v_c;  o = S'q      Mamba-1
//   lru        S_c <- decay_c S_c + v_c;  o = S                                   key_dim is 1, without q and k
// Tokens are taken one after the other, so that no bit of a state depends on how a text was cut. Arithmetic is that of
// float32; matrices of 16 bits are rounded after each token, whose outputs are of the matrix before that.
#pragma once

#include <cstdint>
#include <vector>

#include "rworker/kernels.hpp"

namespace rworker {

enum class StateKind : int { delta = 0, scan = 1, window = 2, selective = 3, lru = 4 };

struct StateSpec {
    StateKind kind;
    std::int64_t heads, groups, key_dim, value_dim;  // window: groups and key_dim are 0, lru: 0 and 1
    std::int64_t taps;
    std::int64_t decays;  // of a head: 1, or one per key dim
    bool silu, norm;
    float scale;
    std::vector<float> filters;  // [taps][channels], the oldest token first; or empty: one tap of 1
    std::vector<float> bias;     // [channels], or empty
    std::vector<float> skip;     // [heads], or empty
    std::vector<float> factors;  // selective: [key_dim][heads * value_dim], none above 0
    std::int64_t kept_rows = 0;  // most rows of a step that a later truncate may undo: drafts
    DType dtype = DType::float32;  // of matrices; windows are float32
    bool keeps_single = false;  // also keeps the only attending row of a sequence in a step

    std::int64_t channels() const { return heads * value_dim + 2 * groups * key_dim; }
    bool has_matrix() const { return kind == StateKind::delta || kind == StateKind::scan; }
    bool by_channel() const { return kind == StateKind::selective || kind == StateKind::lru; }
    std::int64_t numbers() const {
        return kind == StateKind::window ? 0 : heads * (by_channel() ? value_dim : decays + 1);
    }
    /// Elements of a row of the payload, of `item_bytes` each.
    std::int64_t row_elements(std::int64_t item_bytes) const { return channels() + numbers() * 4 / item_bytes; }
    std::int64_t heads_per_group() const { return groups ? heads / groups : 1; }

    std::int64_t first_query() const { return kind == StateKind::delta ? 0 : heads * value_dim + groups * key_dim; }
    std::int64_t first_key() const { return kind == StateKind::delta ? groups * key_dim : heads * value_dim; }
    std::int64_t first_value() const { return kind == StateKind::delta ? 2 * groups * key_dim : 0; }
};

/// Throws Error, which begins with `name`, unless all numbers fit each other.
void check_state(const StateSpec& spec, const char* name);

}  // namespace rworker
