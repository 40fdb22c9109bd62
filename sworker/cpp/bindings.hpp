#pragma once

#include <pybind11/numpy.h>

#include <stdexcept>
#include <string>

#include "integer_weights.hpp"
#include "row_kernels.hpp"

namespace sworker {

namespace py = pybind11;

template <typename T>
using Rows = py::array_t<T, py::array::c_style>;

inline void check(bool holds, const char* what) {
    if (!holds) throw std::invalid_argument(what);
}

inline bool same_shape(const py::array& a, const py::array& b) {
    if (a.ndim() != b.ndim()) return false;
    for (py::ssize_t i = 0; i < a.ndim(); ++i)
        if (a.shape(i) != b.shape(i)) return false;
    return true;
}

inline bool is_matrix(const py::array& a, py::ssize_t rows, std::size_t columns) {
    return a.ndim() == 2 && a.shape(0) == rows && std::size_t(a.shape(1)) == columns;
}

/// The row kernels of an instruction set; of the best with "auto".
const RowKernels& kernels_of(const std::string& isa);
/// The integer kernels of an instruction set, for `threads` threads.
Runner runner_of(const std::string& isa, unsigned threads);
Activation activation_of(const std::string& name);

/// Products of integers.
void bind_integers(py::module_& module);
/// Decoder layers with products of integers; after `bind_integers`.
void bind_layers(py::module_& module);

}  // namespace sworker
