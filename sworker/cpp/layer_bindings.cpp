#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <tuple>

#include "bindings.hpp"
#include "integer_layer.hpp"

namespace sworker {
namespace {

using Shared = std::shared_ptr<IntegerWeights>;

/// (weight [dim], eps, round_first); an empty weight stands for no norm.
using Norm = std::tuple<Rows<float>, float, bool>;

LayerNorm norm_of(const Norm& norm) {
    const auto& [weight, eps, round_first] = norm;
    check(weight.ndim() == 1, "the weight of a norm must be [dim]");
    return {Lines<float>(weight.data(), weight.data() + weight.size()), eps, round_first};
}

IntegerLayer make_layer(const Shared& qkv, const Shared& o, const Shared& gate_up, const Shared& down,
                        const Norm& input_norm, const Norm& post_norm, const Norm& q_norm, const Norm& k_norm,
                        std::size_t heads, std::size_t kv_heads, const std::string& activation) {
    return IntegerLayer({qkv, o, gate_up, down, norm_of(input_norm), norm_of(post_norm), norm_of(q_norm),
                         norm_of(k_norm), heads, kv_heads, activation_of(activation)});
}

bool are_heads(const py::array& rows, py::ssize_t count, std::size_t heads, std::size_t dim) {
    return rows.ndim() == 3 && rows.shape(0) == count && std::size_t(rows.shape(1)) == heads &&
           std::size_t(rows.shape(2)) == dim;
}

template <typename T>
void before(const IntegerLayer& layer, const Rows<T>& x, const Rows<T>& cos, const Rows<T>& sin, Rows<T>& q, Rows<T>& k,
            Rows<T>& v, const std::string& isa, unsigned threads) {
    check(is_matrix(x, x.shape(0), layer.hidden()), "x must be [rows, hidden]");
    const py::ssize_t rows = x.shape(0);
    check(is_matrix(cos, rows, layer.head_dim()) && same_shape(cos, sin), "cos and sin must be [rows, head_dim]");
    check(are_heads(q, rows, layer.heads(), layer.head_dim()), "q must be [rows, heads, head_dim]");
    check(are_heads(k, rows, layer.kv_heads(), layer.head_dim()) && same_shape(k, v),
          "k and v must be [rows, kv_heads, head_dim]");
    const BeforeAttention<T> job{x.data(),         cos.data(),       sin.data(),       q.mutable_data(),
                                 k.mutable_data(), v.mutable_data(), std::size_t(rows)};
    const Runner runner = runner_of(isa, threads);
    const RowKernels& kernels = kernels_of("auto");
    py::gil_scoped_release free;
    layer.run_before(job, runner, kernels);
}

template <typename T>
void after(const IntegerLayer& layer, const Rows<T>& x, const Rows<T>& o, Rows<T>& out, const std::string& isa,
           unsigned threads) {
    check(is_matrix(x, x.shape(0), layer.hidden()) && same_shape(x, out), "x and out must be [rows, hidden]");
    check(is_matrix(o, x.shape(0), layer.heads() * layer.head_dim()), "o must be [rows, heads * head_dim]");
    const AfterAttention<T> job{x.data(), o.data(), out.mutable_data(), std::size_t(x.shape(0))};
    const Runner runner = runner_of(isa, threads);
    const RowKernels& kernels = kernels_of("auto");
    py::gil_scoped_release free;
    layer.run_after(job, runner, kernels);
}

template <typename T>
void bind(py::class_<IntegerLayer>& layer) {
    const auto x = py::arg("x").noconvert(), out = py::arg("out").noconvert();
    layer.def("before", before<T>, x, py::arg("cos").noconvert(), py::arg("sin").noconvert(), py::arg("q").noconvert(),
              py::arg("k").noconvert(), py::arg("v").noconvert(), py::arg("isa"), py::arg("threads"));
    layer.def("after", after<T>, x, py::arg("o").noconvert(), out, py::arg("isa"), py::arg("threads"));
}

}  // namespace

void bind_layers(py::module_& module) {
    py::class_<IntegerLayer> layer(module, "IntegerLayer");
    layer.def(py::init(&make_layer), py::arg("qkv"), py::arg("o"), py::arg("gate_up"), py::arg("down"),
              py::arg("input_norm"), py::arg("post_norm"), py::arg("q_norm"), py::arg("k_norm"), py::arg("heads"),
              py::arg("kv_heads"), py::arg("activation"));
    bind<float>(layer);
    bind<BFloat16>(layer);
}

}  // namespace sworker
