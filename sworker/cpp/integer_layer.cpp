#include "integer_layer.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "parallel.hpp"

namespace sworker {

namespace {

/// Memory for rows that one call computes; unlike a vector, it is not set to zeros.
template <typename T>
class Workspace {
public:
    explicit Workspace(std::size_t count) : count_(count), data_(LineAllocator<T>().allocate(count)) {}
    Workspace(const Workspace&) = delete;
    Workspace& operator=(const Workspace&) = delete;
    ~Workspace() { LineAllocator<T>().deallocate(data_, count_); }
    T* data() const { return data_; }

private:
    std::size_t count_;
    T* data_;
};

template <typename T>
T* own_row(std::size_t width) {
    thread_local Lines<T> row;
    if (row.size() < width) row.resize(width);
    return row.data();
}

/// out [rows, columns] = normed rows · weights. `start(row)` returns the row that is to be normed.
template <typename T, typename Start>
void multiply_normed(const IntegerWeights& weights, const LayerNorm& norm, const Start& start, std::size_t rows, T* out,
                     const Runner& runner, const RowKernels& kernels) {
    const std::size_t width = weights.width();
    const auto read = [&](std::size_t row, float* y) {
        T* own = own_row<T>(width);
        const RmsNorm<T> normed{start(row), nullptr,  norm.weight.data(), own, nullptr, 1,
                                width,      norm.eps, norm.round_first};
        of<T>(kernels).norm(normed, 0);
        const SourceRows<T> source{own, nullptr, width, 0, width, weights.block(), Activation::none};
        return of<T>(*runner.kernels).rotate(source, 0, y);
    };
    const RowGroup all{&weights, 0, rows};
    GroupedProduct({&all, 1}).multiply_read(width, read, out, runner);
}

/// Norm the heads of row `x` [heads, dim] if there is such a norm, and rotate them into row `row` of `out`.
template <typename T>
void finish_heads(const T* x, const LayerNorm& norm, Rotation<T> job, std::size_t row, const RowKernels& kernels) {
    const std::size_t width = job.heads * job.dim;
    if (!norm.weight.empty()) {
        T* own = own_row<T>(width);
        const RmsNorm<T> normed{x,         nullptr, norm.weight.data(), own, nullptr, job.heads, job.dim,
                                norm.eps, norm.round_first};
        for (std::size_t head = 0; head < job.heads; ++head) of<T>(kernels).norm(normed, head);
        x = own;
    }
    job.x = x;
    job.cos += row * job.dim;
    job.sin += row * job.dim;
    job.out += row * width;
    of<T>(kernels).rotate(job, 0);
}

bool fits(const LayerNorm& norm, std::size_t dim) {
    return norm.weight.size() == dim;
}

}  // namespace

IntegerLayer::IntegerLayer(LayerWeights weights) : weights_(std::move(weights)) {
    const auto& [qkv, o, gate_up, down, input_norm, post_norm, q_norm, k_norm, heads, kv_heads, activation] = weights_;
    const auto check = [](bool holds, const char* what) {
        if (!holds) throw std::invalid_argument(what);
    };
    check(qkv && o && gate_up && down, "a layer needs the weights of qkv, o, gate_up and down");
    check(heads > 0 && o->width() % heads == 0 && head_dim() % 2 == 0, "heads must divide the width of o evenly");
    check(qkv->columns() == (heads + 2 * kv_heads) * head_dim(), "qkv must have the columns of all heads");
    check(o->columns() == hidden() && down->columns() == hidden() && gate_up->width() == hidden(),
          "o, gate_up and down must be as wide as x");
    check(gate_up->columns() == 2 * down->width() && activation != Activation::none, "gate_up must be gate and up");
    check(fits(input_norm, hidden()) && fits(post_norm, hidden()), "norms must be as wide as x");
    check(fits(q_norm, q_norm.weight.empty() ? 0 : head_dim()) && fits(k_norm, k_norm.weight.empty() ? 0 : head_dim()),
          "norms of heads must be as wide as a head");
}

template <typename T>
void IntegerLayer::run_before(const BeforeAttention<T>& job, const Runner& runner, const RowKernels& kernels) const {
    const std::size_t columns = weights_.qkv->columns(), dim = head_dim(), k_width = kv_heads() * dim;
    const Workspace<T> qkv(job.rows * columns);
    const auto start = [&](std::size_t row) { return job.x + row * hidden(); };
    multiply_normed(*weights_.qkv, weights_.input_norm, start, job.rows, qkv.data(), runner, kernels);
    parallel_for(job.rows, runner.threads, [&](std::size_t row) {
        const T* q = qkv.data() + row * columns;
        const T* k = q + heads() * dim;
        finish_heads(q, weights_.q_norm, {nullptr, job.cos, job.sin, job.q, 1, heads(), dim, 0}, row, kernels);
        finish_heads(k, weights_.k_norm, {nullptr, job.cos, job.sin, job.k, 1, kv_heads(), dim, 0}, row, kernels);
        std::copy_n(k + k_width, k_width, job.v + row * k_width);
    });
}

template <typename T>
void IntegerLayer::run_after(const AfterAttention<T>& job, const Runner& runner, const RowKernels& kernels) const {
    const std::size_t inner = weights_.down->width(), width = weights_.o->width();
    const Workspace<T> added(job.rows * hidden()), gated(job.rows * 2 * inner);
    weights_.o->multiply({job.o, nullptr, width, 0, width, weights_.o->block(), Activation::none}, job.rows,
                         added.data(), runner);
    const auto start = [&](std::size_t row) {
        of<T>(kernels).add({job.x, added.data(), job.out, hidden()}, row);
        return static_cast<const T*>(job.out + row * hidden());
    };
    multiply_normed(*weights_.gate_up, weights_.post_norm, start, job.rows, gated.data(), runner, kernels);
    const SourceRows<T> source{gated.data() + inner, gated.data(), 2 * inner, 2 * inner, inner, weights_.down->block(),
                               weights_.activation};
    weights_.down->multiply(source, job.rows, added.data(), runner);
    parallel_for(job.rows, runner.threads,
                 [&](std::size_t row) { of<T>(kernels).add({job.out, added.data(), job.out, hidden()}, row); });
}

template void IntegerLayer::run_before(const BeforeAttention<float>&, const Runner&, const RowKernels&) const;
template void IntegerLayer::run_before(const BeforeAttention<BFloat16>&, const Runner&, const RowKernels&) const;
template void IntegerLayer::run_after(const AfterAttention<float>&, const Runner&, const RowKernels&) const;
template void IntegerLayer::run_after(const AfterAttention<BFloat16>&, const Runner&, const RowKernels&) const;

}  // namespace sworker
