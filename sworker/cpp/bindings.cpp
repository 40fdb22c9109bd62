#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings.hpp"
#include "parallel.hpp"
#include "row_kernels.hpp"

namespace sworker {

namespace {

/// Those this CPU can run, best last.
std::vector<const RowKernels*> supported_kernels() {
    std::vector<const RowKernels*> found{&scalar::kernels};
#ifdef SWORKER_X86_64
    if (__builtin_cpu_supports("avx2") != 0) found.push_back(&avx2::kernels);
    if (__builtin_cpu_supports("avx512bw") != 0 && __builtin_cpu_supports("avx512dq") != 0 &&
        __builtin_cpu_supports("avx512vl") != 0)
        found.push_back(&avx512::kernels);
#endif
    return found;
}

}  // namespace

const RowKernels& kernels_of(const std::string& isa) {
    static const std::vector<const RowKernels*> supported = supported_kernels();
    if (isa == "auto") return *supported.back();
    for (const RowKernels* kernels : supported)
        if (isa == kernels->isa) return *kernels;
    throw std::invalid_argument("this CPU runs no kernels named " + isa);
}

namespace {

template <typename T>
RmsNorm<T> norm_job(const Rows<T>& x, const Rows<float>& weight, float eps, bool round_first, Rows<T>& out,
                    const std::optional<Rows<T>>& residual, std::optional<Rows<T>>& total) {
    check(x.ndim() == 2 && same_shape(x, out), "x and out must be [rows, dim] alike");
    check(weight.ndim() == 1 && weight.shape(0) == x.shape(1), "weight must be [dim]");
    check(residual.has_value() == total.has_value(), "residual and total come together");
    check(!residual || (same_shape(x, *residual) && same_shape(x, *total)), "residual and total must be like x");
    return {x.data(),
            residual ? residual->data() : nullptr,
            weight.data(),
            out.mutable_data(),
            total ? total->mutable_data() : nullptr,
            std::size_t(x.shape(0)),
            std::size_t(x.shape(1)),
            eps,
            round_first};
}

/// x may have gaps between its rows, as a slice of a wider product has.
template <typename T>
Rotation<T> rotation_job(const py::array_t<T, 0>& x, const Rows<T>& cos, const Rows<T>& sin, Rows<T>& out) {
    check(x.ndim() == 3 && same_shape(x, out), "x and out must be [rows, heads, dim] alike");
    check(x.shape(2) % 2 == 0, "dim must be even");
    check(cos.ndim() == 2 && cos.shape(0) == x.shape(0) && cos.shape(1) == x.shape(2), "cos must be [rows, dim]");
    check(same_shape(cos, sin), "sin must be like cos");
    const auto size = py::ssize_t(sizeof(T));
    check(x.strides(2) == size && x.strides(1) == x.shape(2) * size && x.strides(0) % size == 0 && x.strides(0) >= 0,
          "x may have gaps between its rows only");
    return {x.data(),
            cos.data(),
            sin.data(),
            out.mutable_data(),
            std::size_t(x.shape(0)),
            std::size_t(x.shape(1)),
            std::size_t(x.shape(2)),
            std::size_t(x.strides(0) / size)};
}

/// Call `kernel(job, row)` for each row. Few elements are computed by this thread alone, faster than others would start.
template <typename Job, typename Kernel>
void run_rows(const Job& job, Kernel kernel, std::size_t elements, unsigned threads) {
    constexpr std::size_t few = 1 << 13;
    const auto run = [&](std::size_t row) { kernel(job, row); };
    if (elements < few) return parallel_for(job.rows, 1, run);
    py::gil_scoped_release free;
    parallel_for(job.rows, threads, run);
}

template <typename T>
WeightedSum<T> sum_job(const Rows<T>& parts, const py::array_t<std::int64_t, py::array::c_style>& places,
                       const Rows<T>& weights, Rows<T>& out) {
    check(parts.ndim() == 2 && is_matrix(out, out.shape(0), std::size_t(parts.shape(1))), "out must be [rows, dim]");
    check(places.ndim() == 2 && places.shape(0) == out.shape(0) && places.shape(1) > 0 && same_shape(places, weights),
          "places and weights must be [rows, terms]");
    for (py::ssize_t i = 0; i < places.size(); ++i)
        check(places.data()[i] >= 0 && places.data()[i] < parts.shape(0), "places must be rows of parts");
    return {parts.data(),
            places.data(),
            weights.data(),
            out.mutable_data(),
            std::size_t(out.shape(0)),
            std::size_t(places.shape(1)),
            std::size_t(parts.shape(1))};
}

template <typename T>
void bind(py::module_& module) {
    const auto threads = py::arg("threads") = 1;
    const auto isa = py::arg("isa") = "auto";
    module.def(
        "rms_norm",
        [](const Rows<T>& x, const Rows<float>& weight, float eps, bool round_first, Rows<T>& out, unsigned number,
               const std::string& name, const std::optional<Rows<T>>& residual, std::optional<Rows<T>> total) {
            run_rows(norm_job<T>(x, weight, eps, round_first, out, residual, total), of<T>(kernels_of(name)).norm,
                     std::size_t(x.size()), number);
        },
        py::arg("x").noconvert(), py::arg("weight").noconvert(), py::arg("eps"), py::arg("round_first"),
        py::arg("out").noconvert(), threads, isa, py::arg("residual").noconvert() = py::none(),
        py::arg("total").noconvert() = py::none());
    module.def(
        "rotate",
        [](const py::array_t<T, 0>& x, const Rows<T>& cos, const Rows<T>& sin, Rows<T>& out, unsigned number,
                 const std::string& name) {
            run_rows(rotation_job<T>(x, cos, sin, out), of<T>(kernels_of(name)).rotate, std::size_t(x.size()), number);
        },
        py::arg("x").noconvert(), py::arg("cos").noconvert(), py::arg("sin").noconvert(), py::arg("out").noconvert(),
        threads, isa);
    module.def(
        "sum_weighted",
        [](const Rows<T>& parts, const py::array_t<std::int64_t, py::array::c_style>& places,
              const Rows<T>& weights, Rows<T>& out, unsigned number, const std::string& name) {
            run_rows(sum_job<T>(parts, places, weights, out), of<T>(kernels_of(name)).sum, std::size_t(parts.size()),
                     number);
        },
        py::arg("parts").noconvert(), py::arg("places").noconvert(), py::arg("weights").noconvert(),
        py::arg("out").noconvert(), threads, isa);
    module.def(
        "choose_likeliest",
        [](const Rows<T>& logits, py::array_t<std::int64_t, py::array::c_style>& tokens, unsigned number,
           const std::string& name) {
            check(logits.ndim() == 2 && logits.shape(1) > 0, "logits must be [rows, vocab]");
            check(tokens.ndim() == 1 && tokens.shape(0) == logits.shape(0), "tokens must be [rows]");
            const Likeliest<T> job{logits.data(), tokens.mutable_data(), std::size_t(logits.shape(0)),
                                   std::size_t(logits.shape(1))};
            // This kernel only compares. The threads sleep by now, so waking them pays only for many elements
            run_rows(job, of<T>(kernels_of(name)).choose, std::size_t(logits.size()) / 64, number);
        },
        py::arg("logits").noconvert(), py::arg("tokens").noconvert(), threads, isa);
}

void multiply_in_order(const Rows<float>& x, const Rows<float>& weight, Rows<float>& out, unsigned threads,
                       const std::string& isa) {
    check(x.ndim() == 2 && weight.ndim() == 2 && x.shape(1) == weight.shape(1), "x and weight must be [_, width]");
    check(is_matrix(out, x.shape(0), std::size_t(weight.shape(0))), "out must be [rows, columns]");
    const OrderedProduct job{x.data(),
                             weight.data(),
                             out.mutable_data(),
                             std::size_t(x.shape(0)),
                             std::size_t(weight.shape(0)),
                             std::size_t(x.shape(1))};
    const RowKernels& kernels = kernels_of(isa);
    py::gil_scoped_release free;
    parallel_for(job.rows, threads, [&](std::size_t row) { kernels.multiply_row(job, row); });
}

void descend(const Rows<double>& moments, Rows<double>& gradient, Rows<std::int8_t>& codes, double unit,
             double farthest, std::size_t sweeps, unsigned threads, const std::string& isa) {
    check(codes.ndim() == 2 && same_shape(codes, gradient), "codes and gradient must be [rows, width] alike");
    const auto rows = std::size_t(codes.shape(0)), width = std::size_t(codes.shape(1));
    check(is_matrix(moments, codes.shape(1), width), "moments must be [width, width]");
    const Descent job{moments.data(), gradient.mutable_data(), codes.mutable_data(), rows, width, sweeps, unit, farthest};
    const RowKernels& kernels = kernels_of(isa);
    std::vector<std::int8_t> nearest(rows * width);
    py::gil_scoped_release free;
    parallel_for(rows, threads, [&](std::size_t row) { kernels.descend(job, row, nearest.data() + row * width); });
}

}  // namespace
}  // namespace sworker

PYBIND11_MODULE(_sworker, module) {
    using namespace sworker;
    module.def("supported_isas", [] {
        std::vector<std::string> names;
        for (const RowKernels* kernels : supported_kernels()) names.emplace_back(kernels->isa);
        return names;
    });
    bind<float>(module);
    bind<BFloat16>(module);
    module.def("multiply_in_order", multiply_in_order, py::arg("x").noconvert(), py::arg("weight").noconvert(),
               py::arg("out").noconvert(), py::arg("threads") = 1, py::arg("isa") = "auto");
    module.def("descend", descend, py::arg("moments").noconvert(), py::arg("gradient").noconvert(),
               py::arg("codes").noconvert(), py::arg("unit"), py::arg("farthest"), py::arg("sweeps"),
               py::arg("threads") = 1, py::arg("isa") = "auto");
    bind_integers(module);
    bind_layers(module);
}
