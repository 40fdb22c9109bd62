// Whole blocks as they lie in the cache, and the checksum of their bytes.
#include <cstring>

#include "rworker/checksum.hpp"
#include "rworker_binding.hpp"

namespace py = pybind11;

namespace rworker_binding {
namespace {

py::array_t<std::uint8_t> export_blocks(const PyRWorker& self, std::int64_t sequence_id, std::int64_t start,
                                        std::int64_t num_tokens) {
    const rworker::Worker& open = self.worker();
    py::array_t<std::uint8_t> data(open.blocks_bytes(sequence_id, start, num_tokens));
    std::uint8_t* const out = data.mutable_data();
    const py::gil_scoped_release unlocked;
    open.export_blocks(sequence_id, start, num_tokens, out);
    return data;
}

void import_blocks(PyRWorker& self, std::int64_t sequence_id, std::int64_t num_tokens, const py::array& data,
                   std::int64_t start) {
    const std::span<const std::uint8_t> bytes = bytes_of(data);
    rworker::Worker& open = self.worker();
    const py::gil_scoped_release unlocked;
    open.import_blocks(sequence_id, start, num_tokens, bytes);
}

py::bytes checksum(const py::array& data, const py::bytes& begin, bool by_tables) {
    rworker::Checksum lanes;
    const std::string start = begin;
    if (start.size() != sizeof lanes) throw rworker::Error("start must have " + std::to_string(sizeof lanes) + " bytes");
    std::memcpy(lanes.data(), start.data(), sizeof lanes);
    const std::span<const std::uint8_t> bytes = bytes_of(data);
    {
        const py::gil_scoped_release unlocked;
        lanes = by_tables ? rworker::checksum_by_tables(bytes, lanes) : rworker::checksum(bytes, lanes);
    }
    return py::bytes(reinterpret_cast<const char*>(lanes.data()), sizeof lanes);
}

}  // namespace

void bind_blocks(py::module_& module, py::class_<PyRWorker>& cls) {
    cls.def("export_blocks", &export_blocks, py::arg("sequence_id"), py::arg("start"), py::arg("num_tokens"));
    cls.def("import_blocks", &import_blocks, py::arg("sequence_id"), py::arg("num_tokens"), py::arg("data").noconvert(),
            py::arg("start") = 0);
    module.def("checksum", &checksum, py::arg("data").noconvert(), py::arg("start"), py::kw_only(), py::arg("by_tables") = false);
}

}  // namespace rworker_binding
