// Bindings that export and import sequences between steps, and move rows of incoming sequences at any time.
#include <optional>

#include "rworker_binding.hpp"

namespace rworker_binding {

std::span<const std::uint8_t> bytes_of(const py::array& data) {
    const bool contiguous = (data.flags() & py::array::c_style) != 0;
    if (!py::isinstance<py::array_t<std::uint8_t>>(data) || data.ndim() != 1 || !contiguous)
        throw rworker::Error("data must be a C-contiguous uint8 array of one dimension, not " + describe(data) +
                             (contiguous ? "" : " with strides"));
    return {static_cast<const std::uint8_t*>(data.data()), std::size_t(data.size())};
}

py::array_t<std::uint8_t> PyRWorker::export_sequence(std::int64_t sequence_id, std::int64_t start,
                                                     std::optional<std::int64_t> most) {
    rworker::Worker& open = worker();
    if (!most) open.cache().check_export(sequence_id, start, 0);
    const std::int64_t num_tokens = most ? *most : open.cache().whole_sequence(sequence_id).length - start;
    py::array_t<std::uint8_t> data(open.export_bytes(sequence_id, start, num_tokens));
    std::uint8_t* out = data.mutable_data();
    {
        py::gil_scoped_release unlocked;
        open.export_sequence(sequence_id, start, num_tokens, out);
    }
    return data;
}

void PyRWorker::import_sequence(std::int64_t sequence_id, std::int64_t num_tokens, const py::array& data,
                                std::int64_t start) {
    const std::span<const std::uint8_t> bytes = bytes_of(data);
    rworker::Worker& open = worker();
    py::gil_scoped_release unlocked;
    open.import_sequence(sequence_id, start, num_tokens, bytes);
}

void PyRWorker::check_store(std::int64_t job_id, std::int64_t layer, std::int64_t start, std::int64_t num_rows) const {
    const std::shared_ptr<rworker::Worker> open = shared_worker();
    const py::gil_scoped_release unlocked;
    open->cache().check_store(job_id, layer, start, num_rows);
}

void PyRWorker::store(std::int64_t job_id, std::int64_t layer, std::int64_t start, const py::array& k,
                      const py::array& v) {
    const std::shared_ptr<rworker::Worker> open = shared_worker();
    const std::int64_t num_rows = k.ndim() > 0 ? k.shape(0) : 0;
    {
        const py::gil_scoped_release unlocked;
        open->cache().check_store(job_id, layer, start, num_rows);
    }
    const rworker::LayerSpec& spec = open->cache().layers()[layer];
    check_array(k, {"k", num_rows, spec.num_kv_heads, spec.key_dim});
    check_array(v, {"v", num_rows, spec.num_kv_heads, spec.stored_value_dim()});
    const rworker::IncomingRows rows{k.data(), v.data(), start, num_rows, open->model_dtype()};
    const py::gil_scoped_release unlocked;
    open->store(job_id, layer, rows);
}

void PyRWorker::store_state(std::int64_t job_id, std::int64_t layer,
                            const py::array_t<std::uint8_t, py::array::c_style>& data) {
    const std::shared_ptr<rworker::Worker> open = shared_worker();
    const std::span<const std::uint8_t> bytes(data.data(), std::size_t(data.size()));
    const py::gil_scoped_release unlocked;
    open->store_state(job_id, layer, bytes);
}

py::array_t<std::uint8_t> PyRWorker::read_prefix(std::int64_t job_id, std::int64_t layer, std::int64_t start,
                                                 std::int64_t num_rows) const {
    const std::shared_ptr<rworker::Worker> open = shared_worker();
    {
        const py::gil_scoped_release unlocked;
        open->cache().check_read(job_id, layer, start, num_rows);
    }
    py::array_t<std::uint8_t> data({num_rows, open->cache().token_bytes(layer)});
    const rworker::OutgoingRows rows{data.mutable_data(), start, num_rows};
    {
        const py::gil_scoped_release unlocked;
        open->read_prefix(job_id, layer, rows);
    }
    return data;
}

}  // namespace rworker_binding
