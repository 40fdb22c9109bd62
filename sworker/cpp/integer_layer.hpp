#pragma once

#include <cstddef>
#include <memory>

#include "grouped_product.hpp"
#include "row_kernels.hpp"

namespace sworker {

/// See `RmsNorm`. `weight` is empty where a layer has no such norm.
struct LayerNorm {
    Lines<float> weight;
    float eps = 0.0f;
    bool round_first = false;
};

/// The weights of a decoder layer. `q_norm` and `k_norm` are over each head.
struct LayerWeights {
    std::shared_ptr<const IntegerWeights> qkv, o, gate_up, down;
    LayerNorm input_norm, post_norm, q_norm, k_norm;
    std::size_t heads, kv_heads;
    Activation activation;
};

/// x [rows, hidden]; cos and sin [rows, head_dim]; q [rows, heads, head_dim]; k and v [rows, kv_heads, head_dim].
template <typename T>
struct BeforeAttention {
    const T* x;
    const T* cos;
    const T* sin;
    T* q;
    T* k;
    T* v;
    std::size_t rows;
};

/// x and out [rows, hidden], o [rows, heads · head_dim].
template <typename T>
struct AfterAttention {
    const T* x;
    const T* o;
    T* out;
    std::size_t rows;
};

/// The dense part of a decoder layer, in one call before attention and one after it. Each row gets the bits that
/// separate norms, products and rotations give it.
class IntegerLayer {
public:
    /// Throws std::invalid_argument where shapes do not fit each other.
    explicit IntegerLayer(LayerWeights weights);

    std::size_t hidden() const { return weights_.qkv->width(); }
    std::size_t heads() const { return weights_.heads; }
    std::size_t kv_heads() const { return weights_.kv_heads; }
    std::size_t head_dim() const { return weights_.o->width() / weights_.heads; }

    /// Norm, products of q, k and v, norms of heads, rotary embedding.
    template <typename T>
    void run_before(const BeforeAttention<T>& job, const Runner& runner, const RowKernels& kernels) const;
    /// Product of o, residual, norm, gated feed-forward layer, residual.
    template <typename T>
    void run_after(const AfterAttention<T>& job, const Runner& runner, const RowKernels& kernels) const;

private:
    LayerWeights weights_;
};

}  // namespace sworker
