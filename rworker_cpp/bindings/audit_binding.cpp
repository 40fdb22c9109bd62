// Attention computed again, one layer's rows, and checksums of blocks: see the stub.
#include <optional>

#include "rworker_binding.hpp"

namespace py = pybind11;

namespace rworker_binding {

py::array PyRWorker::attend_again(std::int64_t sequence_id, std::int64_t layer, std::int64_t position,
                                  std::int64_t mode, const py::array& query) {
    rworker::Worker& open = worker();
    const rworker::Again asked{sequence_id, layer, position, rworker::SpanMode(mode)};
    const rworker::RowCount rows = open.rows_again(asked);
    const rworker::LayerSpec& spec = open.cache().layers()[layer];
    check_array(query, {"query", 1, spec.num_heads, spec.sent_query_dim()});
    const void* const queries = query.data();
    if (rows.partials) {
        py::array_t<float> partials({rows.partials, spec.partial_heads(), spec.partial_floats()});
        float* const found = partials.mutable_data();
        const py::gil_scoped_release unlocked;
        open.attend_again(asked, queries, nullptr, found);
        return std::move(partials);
    }
    const bool is_float = open.model_dtype() == rworker::DType::float32;
    const std::vector<py::ssize_t> shape{1, spec.num_heads, spec.sent_value_dim()};
    py::array out(is_float ? py::dtype::of<float>() : py::dtype::of<std::uint16_t>(), shape);
    void* const found = out.mutable_data();
    const py::gil_scoped_release unlocked;
    open.attend_again(asked, queries, found, nullptr);
    return out;
}

namespace {

py::array_t<std::uint8_t> export_layer(const PyRWorker& self, std::int64_t sequence_id, std::int64_t layer,
                                       bool as_blocks) {
    const rworker::Worker& open = self.worker();
    py::array_t<std::uint8_t> data(open.layer_bytes(sequence_id, layer, as_blocks));
    std::uint8_t* const out = data.mutable_data();
    const py::gil_scoped_release unlocked;
    open.export_layer(sequence_id, layer, as_blocks, out);
    return data;
}

std::int64_t find_damage(const PyRWorker& self, std::int64_t sequence_id, std::int64_t num_tokens, std::int64_t layer) {
    const rworker::Worker& open = self.worker();
    const py::gil_scoped_release unlocked;
    return open.cache().find_damage(sequence_id, num_tokens, layer);
}

}  // namespace

void bind_audits(py::class_<PyRWorker>& cls) {
    cls.def("attend_again", &PyRWorker::attend_again, py::arg("sequence_id"), py::arg("layer"), py::arg("position"),
            py::arg("mode"), py::arg("query").noconvert());
    cls.def("export_layer", &export_layer, py::arg("sequence_id"), py::arg("layer"), py::arg("as_blocks") = false);
    cls.def("find_damage", &find_damage, py::arg("sequence_id"), py::arg("num_tokens") = -1, py::arg("layer") = -1);
    cls.def("keep_checksums", [](const PyRWorker& self) { self.worker().keep_checksums(); });
    cls.def(
        "flip_bit",
        [](const PyRWorker& self, std::int64_t sequence_id, std::int64_t layer, std::int64_t token, std::int64_t bit) {
            self.worker().cache().flip_bit(sequence_id, layer, token, bit);
        },
        py::arg("sequence_id"), py::arg("layer"), py::arg("token"), py::arg("bit"));
}

}  // namespace rworker_binding
