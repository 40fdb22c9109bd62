#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "grouped_product.hpp"
#include "integer_weights.hpp"
#include "parallel.hpp"

namespace sworker {
namespace {

/// Those this CPU can run, best last.
const std::vector<const IntegerKernels*>& supported_integer_kernels() {
    static const std::vector<const IntegerKernels*> supported = [] {
        std::vector<const IntegerKernels*> found{&scalar::integer_kernels};
#ifdef SWORKER_X86_64
        if (__builtin_cpu_supports("avx2") != 0) found.push_back(&avx2::integer_kernels);
        if (__builtin_cpu_supports("avx512bw") != 0 && __builtin_cpu_supports("avx512dq") != 0 &&
            __builtin_cpu_supports("avx512vl") != 0 && __builtin_cpu_supports("avx512vnni") != 0)
            found.push_back(&avx512_vnni::integer_kernels);
#endif
        return found;
    }();
    return supported;
}

}  // namespace

Runner runner_of(const std::string& isa, unsigned threads) {
    for (const IntegerKernels* kernels : supported_integer_kernels())
        if (isa == kernels->isa) return {kernels, threads};
    throw std::invalid_argument("this CPU runs no integer products named " + isa);
}

Activation activation_of(const std::string& name) {
    if (name == "none") return Activation::none;
    if (name == "silu") return Activation::silu;
    if (name == "gelu_tanh") return Activation::gelu_tanh;
    throw std::invalid_argument("no activation named " + name);
}

namespace {

using Codes = py::array_t<std::int8_t, py::array::c_style>;
using Sums = py::array_t<std::int32_t, py::array::c_style>;
using Numbers = py::array_t<float, py::array::c_style>;

/// x is [rows, width]; with an activation [rows, 2 · width], gates first.
template <typename T>
SourceRows<T> source_of(const Rows<T>& x, std::size_t width, std::size_t block, Activation activation) {
    const bool gated = activation != Activation::none;
    const std::size_t stride = width * (gated ? 2 : 1);
    check(x.ndim() == 2 && std::size_t(x.shape(1)) == stride, "x must be [rows, width], or twice as wide with gates");
    check(is_block(block, width), "block must divide the width and have no other factors than 2, 3, 5 and 7");
    const T* first = x.data();
    return {gated ? first + width : first, gated ? first : nullptr, stride, stride, width, block, activation};
}

/// Sums of more elements could exceed 32 bits.
constexpr std::size_t MOST_WIDTH = 130000;

IntegerWeights make_weights(const Codes& codes, const Numbers& scales, const std::optional<Numbers>& bias,
                            std::size_t block, unsigned threads) {
    check(codes.ndim() == 2 && codes.shape(0) > 0 && codes.shape(1) > 0, "codes must be [columns, width]");
    const auto columns = std::size_t(codes.shape(0)), width = std::size_t(codes.shape(1));
    check(width <= MOST_WIDTH, "more than 130000 elements in a row");
    check(is_block(block, width), "block must divide the width and have no other factors than 2, 3, 5 and 7");
    check(scales.ndim() == 1 && std::size_t(scales.shape(0)) == columns, "scales must be [columns]");
    check(!bias || (bias->ndim() == 1 && std::size_t(bias->shape(0)) == columns), "bias must be [columns]");
    const float* own_bias = bias ? bias->data() : nullptr;
    const std::int8_t* own_codes = codes.data();
    const float* own_scales = scales.data();
    py::gil_scoped_release free;
    return IntegerWeights(own_codes, columns, width, block, own_scales, own_bias, threads);
}

template <typename T>
void multiply(const IntegerWeights& weights, const Rows<T>& x, Rows<T>& out, const std::string& activation,
              const std::string& isa, unsigned threads) {
    const auto source = source_of<T>(x, weights.width(), weights.block(), activation_of(activation));
    check(is_matrix(out, x.shape(0), weights.columns()), "out must be [rows, columns]");
    const Runner runner = runner_of(isa, threads);
    const auto rows = std::size_t(x.shape(0));
    T* place = out.mutable_data();
    py::gil_scoped_release free;
    weights.multiply(source, rows, place, runner);
}

template <typename T>
void find_peaks(const IntegerWeights& weights, const Rows<T>& x, Numbers& peaks, const std::string& activation,
                const std::string& isa, unsigned threads) {
    const auto source = source_of<T>(x, weights.width(), weights.block(), activation_of(activation));
    check(peaks.ndim() == 1 && peaks.shape(0) == x.shape(0), "peaks must be [rows]");
    const Runner runner = runner_of(isa, threads);
    const auto rows = std::size_t(x.shape(0));
    float* place = peaks.mutable_data();
    py::gil_scoped_release free;
    weights.find_peaks(source, rows, place, runner);
}

template <typename T>
void add_up(const IntegerWeights& weights, const Rows<T>& x, const Numbers& peaks, Sums& sums,
            const std::string& activation, const std::string& isa, unsigned threads) {
    const auto source = source_of<T>(x, weights.width(), weights.block(), activation_of(activation));
    check(peaks.ndim() == 1 && peaks.shape(0) == x.shape(0), "peaks must be [rows]");
    check(is_matrix(sums, x.shape(0), weights.columns()), "sums must be [rows, columns]");
    const Runner runner = runner_of(isa, threads);
    const auto rows = std::size_t(x.shape(0));
    const float* own_peaks = peaks.data();
    std::int32_t* place = sums.mutable_data();
    py::gil_scoped_release free;
    weights.add_up(source, rows, own_peaks, place, runner);
}

template <typename T>
void scale(const IntegerWeights& weights, const Sums& sums, const Numbers& peaks, Rows<T>& out, const std::string& isa,
           unsigned threads) {
    check(peaks.ndim() == 1 && is_matrix(sums, peaks.shape(0), weights.columns()), "sums must be [rows, columns]");
    check(is_matrix(out, peaks.shape(0), weights.columns()), "out must be [rows, columns]");
    const Runner runner = runner_of(isa, threads);
    weights.scale(sums.data(), std::size_t(peaks.shape(0)), peaks.data(), out.mutable_data(), runner);
}

template <typename T>
void quantize(const Rows<T>& x, std::size_t block, Codes& codes, Numbers& scales, const std::string& isa,
              unsigned threads) {
    check(x.ndim() == 2, "x must be [rows, width]");
    const auto source = source_of<T>(x, std::size_t(x.shape(1)), block, Activation::none);
    check(is_matrix(codes, x.shape(0), std::size_t(x.shape(1))), "codes must be like x");
    check(scales.ndim() == 1 && scales.shape(0) == x.shape(0), "scales must be [rows]");
    const Runner runner = runner_of(isa, threads);
    const auto rows = std::size_t(x.shape(0));
    std::int8_t* place = codes.mutable_data();
    float* own_scales = scales.mutable_data();
    py::gil_scoped_release free;
    quantize_rows(source, rows, place, own_scales, runner);
}

Codes unpack(const IntegerWeights& weights) {
    Codes codes({weights.columns(), weights.width()});
    weights.unpack(codes.mutable_data());
    return codes;
}

using Ends = py::array_t<std::int64_t, py::array::c_style>;
using Shared = std::shared_ptr<IntegerWeights>;

/// The weights of a mixture's experts, all of one shape and block.
class Experts {
public:
    explicit Experts(std::vector<Shared> experts) : experts_(std::move(experts)) {
        check(!experts_.empty(), "experts must not be empty");
        for (const Shared& each : experts_)
            check(each->columns() == any().columns() && each->width() == any().width() && each->block() == any().block(),
                  "all experts must have one shape and one block");
    }

    const IntegerWeights& any() const { return *experts_.front(); }
    const std::vector<Shared>& all() const { return experts_; }

    /// The groups of `rows` rows, those of expert e up to `ends[e]`; experts without rows have none.
    std::vector<RowGroup> groups_of(const Ends& ends, py::ssize_t rows) const {
        check(ends.ndim() == 1 && std::size_t(ends.shape(0)) == experts_.size(), "ends must be [experts]");
        std::vector<RowGroup> groups;
        std::int64_t begin = 0;
        for (std::size_t expert = 0; expert < experts_.size(); ++expert) {
            const std::int64_t end = ends.data()[expert];
            check(end >= begin, "ends must not fall");
            if (end > begin) groups.push_back({experts_[expert].get(), std::size_t(begin), std::size_t(end)});
            begin = end;
        }
        check(begin == rows, "the last of ends must be the number of rows");
        return groups;
    }

private:
    std::vector<Shared> experts_;
};

template <typename T>
void multiply_experts(const Experts& experts, const Rows<T>& x, const Ends& ends, Rows<T>& out,
                      const std::string& activation, const std::string& isa, unsigned threads) {
    const auto source = source_of<T>(x, experts.any().width(), experts.any().block(), activation_of(activation));
    check(is_matrix(out, x.shape(0), experts.any().columns()), "out must be [rows, columns]");
    const std::vector<RowGroup> groups = experts.groups_of(ends, x.shape(0));
    const Runner runner = runner_of(isa, threads);
    T* place = out.mutable_data();
    py::gil_scoped_release free;
    GroupedProduct(groups).multiply(source, place, runner);
}

template <typename T>
void add_up_experts(const Experts& experts, const Rows<T>& x, const Ends& ends, const Numbers& peaks, Sums& sums,
                    const std::string& activation, const std::string& isa, unsigned threads) {
    const auto source = source_of<T>(x, experts.any().width(), experts.any().block(), activation_of(activation));
    check(peaks.ndim() == 1 && peaks.shape(0) == x.shape(0), "peaks must be [rows]");
    check(is_matrix(sums, x.shape(0), experts.any().columns()), "sums must be [rows, columns]");
    const std::vector<RowGroup> groups = experts.groups_of(ends, x.shape(0));
    const Runner runner = runner_of(isa, threads);
    const float* own_peaks = peaks.data();
    std::int32_t* place = sums.mutable_data();
    py::gil_scoped_release free;
    GroupedProduct(groups).add_up(source, own_peaks, place, runner);
}

template <typename T>
void scale_experts(const Experts& experts, const Sums& sums, const Ends& ends, const Numbers& peaks, Rows<T>& out,
                   const std::string& isa, unsigned threads) {
    const std::size_t columns = experts.any().columns();
    check(peaks.ndim() == 1 && is_matrix(sums, peaks.shape(0), columns), "sums must be [rows, columns]");
    check(is_matrix(out, peaks.shape(0), columns), "out must be [rows, columns]");
    const std::vector<RowGroup> groups = experts.groups_of(ends, peaks.shape(0));
    GroupedProduct(groups).scale(sums.data(), peaks.data(), out.mutable_data(), runner_of(isa, threads));
}

template <typename T>
void find_experts_peaks(const Experts& experts, const Rows<T>& x, Numbers& peaks, const std::string& activation,
                        const std::string& isa, unsigned threads) {
    find_peaks<T>(experts.any(), x, peaks, activation, isa, threads);
}

template <typename T>
void bind_rows(py::module_& module, py::class_<IntegerWeights, Shared>& weights, py::class_<Experts>& experts) {
    const auto x = py::arg("x").noconvert(), out = py::arg("out").noconvert(), peaks = py::arg("peaks").noconvert();
    const auto activation = py::arg("activation"), isa = py::arg("isa"), threads = py::arg("threads");
    const auto sums = py::arg("sums").noconvert();
    weights.def("multiply", multiply<T>, x, out, activation, isa, threads);
    weights.def("find_peaks", find_peaks<T>, x, peaks, activation, isa, threads);
    weights.def("add_up", add_up<T>, x, peaks, sums, activation, isa, threads);
    weights.def("scale", scale<T>, sums, peaks, out, isa, threads);
    const auto ends = py::arg("ends").noconvert();
    experts.def("multiply", multiply_experts<T>, x, ends, out, activation, isa, threads);
    experts.def("find_peaks", find_experts_peaks<T>, x, peaks, activation, isa, threads);
    experts.def("add_up", add_up_experts<T>, x, ends, peaks, sums, activation, isa, threads);
    experts.def("scale", scale_experts<T>, sums, ends, peaks, out, isa, threads);
    module.def("quantize", quantize<T>, x, py::arg("block"), py::arg("codes").noconvert(),
               py::arg("scales").noconvert(), isa, threads);
}

}  // namespace

void bind_integers(py::module_& module) {
    py::class_<IntegerWeights, Shared> weights(module, "IntegerWeights");
    py::class_<Experts> experts(module, "IntegerExperts");
    experts.def(py::init<std::vector<Shared>>(), py::arg("experts"));
    experts.def_property_readonly("experts", &Experts::all);
    weights.def(py::init(&make_weights), py::arg("codes").noconvert(), py::arg("scales").noconvert(), py::arg("bias"),
                py::arg("block"), py::arg("threads"));
    weights.def("unpack", unpack);
    weights.def_property_readonly("num_bytes", &IntegerWeights::num_bytes);
    bind_rows<float>(module, weights, experts);
    bind_rows<BFloat16>(module, weights, experts);
    module.def("integer_isas", [] {
        std::vector<std::string> names;
        for (const IntegerKernels* kernels : supported_integer_kernels()) names.emplace_back(kernels->isa);
        return names;
    });
    module.def("use_openmp", [](std::uintptr_t region, std::uintptr_t number) {
        parallel_region() = reinterpret_cast<ParallelRegion>(region);
        thread_number() = reinterpret_cast<ThreadNumber>(number);
    });
}

}  // namespace sworker
