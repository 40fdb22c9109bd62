#pragma once

#include <pybind11/numpy.h>

#include <stdexcept>

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

/// Products of integers.
void bind_integers(py::module_& module);

}  // namespace sworker
