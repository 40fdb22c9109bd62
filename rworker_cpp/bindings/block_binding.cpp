// Whole blocks as they lie in the cache, and the checksum of their bytes.
#include <cerrno>
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

rworker::Checksum lanes_of(const std::string& text) {
    rworker::Checksum lanes;
    if (text.size() != sizeof lanes) throw rworker::Error("start must have " + std::to_string(sizeof lanes) + " bytes");
    std::memcpy(lanes.data(), text.data(), sizeof lanes);
    return lanes;
}

py::bytes text_of(const rworker::Checksum& lanes) { return py::bytes(reinterpret_cast<const char*>(lanes.data()), sizeof lanes); }

py::list read_blocks(PyRWorker& self, std::int64_t sequence_id, std::int64_t start, int fd, const py::list& pieces) {
    std::vector<rworker::FilePiece> wanted;
    for (const py::handle& each : pieces) {
        const auto [num_tokens, offset, begin] = each.cast<std::tuple<std::int64_t, std::int64_t, py::bytes>>();
        wanted.push_back({num_tokens, offset, lanes_of(begin)});
    }
    rworker::Worker& open = self.worker();
    int error = 0;
    {
        const py::gil_scoped_release unlocked;
        error = open.read_blocks(sequence_id, start, fd, wanted);
    }
    if (error == rworker::ReadJob::kFileEnds) throw rworker::Error("the file ends too early");
    if (error) {
        errno = error;
        PyErr_SetFromErrno(PyExc_OSError);
        throw py::error_already_set();
    }
    py::list checksums;
    for (const rworker::FilePiece& each : wanted) checksums.append(text_of(each.checksum));
    return checksums;
}

py::bytes checksum(const py::array& data, const py::bytes& begin, bool by_tables) {
    rworker::Checksum lanes = lanes_of(begin);
    const std::span<const std::uint8_t> bytes = bytes_of(data);
    {
        const py::gil_scoped_release unlocked;
        lanes = by_tables ? rworker::checksum_by_tables(bytes, lanes) : rworker::checksum(bytes, lanes);
    }
    return text_of(lanes);
}

}  // namespace

void bind_blocks(py::module_& module, py::class_<PyRWorker>& cls) {
    cls.def("export_blocks", &export_blocks, py::arg("sequence_id"), py::arg("start"), py::arg("num_tokens"));
    cls.def("import_blocks", &import_blocks, py::arg("sequence_id"), py::arg("num_tokens"), py::arg("data").noconvert(),
            py::arg("start") = 0);
    cls.def("read_blocks", &read_blocks, py::arg("sequence_id"), py::arg("start"), py::arg("fd"), py::arg("pieces"));
    module.def("checksum", &checksum, py::arg("data").noconvert(), py::arg("start"), py::kw_only(), py::arg("by_tables") = false);
}

}  // namespace rworker_binding
