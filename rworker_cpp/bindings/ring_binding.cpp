#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "rworker/ring.hpp"
#include "rworker/types.hpp"
#include "rworker_binding.hpp"

namespace rworker_binding {
namespace {

/// A ring in the memory of a numpy array.
class PyRing {
  public:
    PyRing(py::array_t<std::uint8_t, py::array::c_style> memory) : memory_(std::move(memory)), ring_(place(memory_)) {}

    void push(std::uint64_t word) { ring_.push(word); }
    std::optional<std::uint64_t> pop(double timeout_seconds) {
        if (timeout_seconds <= 0) return ring_.pop(0);
        const py::gil_scoped_release unlocked;
        return ring_.pop(timeout_seconds);
    }

  private:
    static void* place(py::array_t<std::uint8_t, py::array::c_style>& memory) {
        if (!memory.writeable() || memory.nbytes() < py::ssize_t(sizeof(rworker::RingState)) ||
            reinterpret_cast<std::uintptr_t>(memory.data()) % alignof(rworker::RingState) != 0)
            throw rworker::Error("memory must be a writeable uint8 array of at least " +
                                 std::to_string(sizeof(rworker::RingState)) + " bytes, aligned to " +
                                 std::to_string(alignof(rworker::RingState)));
        return memory.mutable_data();
    }

    py::array_t<std::uint8_t, py::array::c_style> memory_;
    rworker::Ring ring_;
};

}  // namespace

void bind_ring(py::module_& module) {
    py::class_<PyRing> cls(module, "Ring");
    cls.def(py::init<py::array_t<std::uint8_t, py::array::c_style>>(), py::arg("memory").noconvert());
    cls.def("push", &PyRing::push, py::arg("word"));
    cls.def("pop", &PyRing::pop, py::arg("timeout_seconds"));
    cls.attr("NUM_BYTES") = sizeof(rworker::RingState);
}

}  // namespace rworker_binding
