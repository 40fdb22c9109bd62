#include "rworker_binding.hpp"

#include <pybind11/stl.h>

#include <optional>

#include "rworker/kernel_choice.hpp"

namespace rworker_binding {

std::string describe(const py::array& array) {
    return py::str(array.dtype()).cast<std::string>() + py::str(array.attr("shape")).cast<std::string>();
}

namespace {

using rworker::Control;
using rworker::DType;
using rworker::Error;
using rworker::LayerSpec;
using rworker::Span;

/// The four columns of a control or span table, row by row.
template <class Record, class Make>
std::vector<Record> parse_table(const py::array& table, const std::string& name, Make make) {
    const bool contiguous = (table.flags() & py::array::c_style) != 0;
    if (!py::isinstance<py::array_t<std::int64_t>>(table) || table.ndim() != 2 || table.shape(1) != 4 || !contiguous)
        throw Error(name + " must be a C-contiguous int64 array of shape (n, 4), not " + describe(table) +
                    (contiguous ? "" : " with strides"));
    std::vector<Record> records;
    const auto rows = table.unchecked<std::int64_t, 2>();
    for (py::ssize_t i = 0; i < rows.shape(0); ++i)
        records.push_back(make(rows(i, 0), rows(i, 1), rows(i, 2), rows(i, 3)));
    return records;
}

}  // namespace

void check_partials(const py::array& partials, std::int64_t rows, std::int64_t num_heads, std::int64_t floats) {
    const bool right = py::isinstance<py::array_t<float>>(partials) && partials.ndim() == 3 &&
                       (rows < 0 || partials.shape(0) == rows) && (num_heads < 0 || partials.shape(1) == num_heads) &&
                       partials.shape(2) == floats && (partials.flags() & py::array::c_style) != 0 &&
                       reinterpret_cast<std::uintptr_t>(partials.data()) % sizeof(float) == 0;
    if (right) return;
    throw Error("partials must be a C-contiguous, aligned float32 array of shape (" +
                (rows < 0 ? "rows" : std::to_string(rows)) + ", " + (num_heads < 0 ? "heads" : std::to_string(num_heads)) + ", " +
                std::to_string(floats) + "), not " + describe(partials));
}

PyRWorker::PyRWorker(const py::list& layers, const std::string& model_dtype, const std::string& kv_dtype,
                     std::int64_t block_size, std::int64_t num_blocks, int num_threads, std::vector<int> cores,
                     const std::string& isa, const std::string& read_ahead) {
    rworker::WorkerConfig config{parse_layers(layers),
                                 rworker::parse_model_dtype(model_dtype),
                                 rworker::parse_kv_dtype(kv_dtype),
                                 block_size,
                                 num_blocks,
                                 num_threads,
                                 std::move(cores),
                                 isa,
                                 rworker::parse_read_ahead(read_ahead)};
    worker_ = std::make_shared<rworker::Worker>(std::move(config));
}

std::int64_t PyRWorker::block_bytes(const py::list& layers, const std::string& kv_dtype, std::int64_t block_size) {
    return rworker::block_bytes(parse_layers(layers), rworker::parse_kv_dtype(kv_dtype), block_size);
}

std::int64_t PyRWorker::state_blocks(const py::list& layers, const std::string& kv_dtype, std::int64_t block_size) {
    return rworker::state_blocks(parse_layers(layers), rworker::parse_kv_dtype(kv_dtype), block_size);
}

rworker::Worker& PyRWorker::worker() const { return *shared_worker(); }

const std::shared_ptr<rworker::Worker>& PyRWorker::shared_worker() const {
    if (!worker_) throw Error("the R-worker is closed");
    return worker_;
}

void PyRWorker::begin_step(const py::array& controls, const std::vector<py::array>& mini_batches) {
    const auto control_rows = parse_table<Control>(
        controls, "controls",
        [](auto verb, auto id, auto source, auto tokens) { return Control{rworker::Verb(verb), id, source, tokens}; });
    std::vector<std::vector<Span>> spans;
    for (std::size_t i = 0; i < mini_batches.size(); ++i)
        spans.push_back(parse_table<Span>(
            mini_batches[i], "mini_batches[" + std::to_string(i) + "]",
            [](auto id, auto context, auto rows, auto mode) { return Span{id, context, rows, rworker::SpanMode(mode)}; }));
    rworker::Worker& open = worker();
    py::gil_scoped_release unlocked;
    open.begin_step(control_rows, spans);
}

void PyRWorker::set_weights(std::int64_t layer, std::int64_t first_head, const py::array& rows) {
    rworker::Worker& open = worker();
    const std::vector<LayerSpec>& layers = open.cache().layers();
    if (layer < 0 || layer >= std::int64_t(layers.size()) || !layers[layer].absorbs())
        throw Error("set_weights: layer " + std::to_string(layer) + " multiplies no K and V here");
    const LayerSpec& spec = layers[layer];
    const std::int64_t heads = rows.ndim() > 0 ? rows.shape(0) : 0;
    check_array(rows, {"rows", heads, spec.latent()->nope_dim + spec.latent()->out_dim, spec.value_dim});
    const py::gil_scoped_release unlocked;
    open.set_weights(layer, first_head, heads, rows.data());
}

void PyRWorker::check_array(const py::array& array, const Shape& shape) const {
    const bool is_float = worker().model_dtype() == DType::float32;
    const bool right_dtype = is_float
                                 ? array.dtype().is(py::dtype::of<float>()) || py::isinstance<py::array_t<float>>(array)
                                 : py::isinstance<py::array_t<std::uint16_t>>(array);
    const bool right_shape = array.ndim() == 3 && array.shape(0) == shape.rows && array.shape(1) == shape.heads &&
                             array.shape(2) == shape.dim;
    const bool contiguous = (array.flags() & py::array::c_style) != 0;
    const bool aligned = reinterpret_cast<std::uintptr_t>(array.data()) % array.itemsize() == 0;
    if (right_dtype && right_shape && contiguous && aligned) return;
    throw Error(std::string(shape.name) + " must be a C-contiguous, aligned " + (is_float ? "float32" : "uint16") +
                " array of shape (" + std::to_string(shape.rows) + ", " + std::to_string(shape.heads) + ", " +
                std::to_string(shape.dim) + "), not " + describe(array) + (contiguous ? "" : " with strides"));
}

rworker::Payload PyRWorker::checked_payload(std::int64_t mini_batch, std::int64_t layer, const py::array& q,
                                            const py::array& k, const py::array& v, py::array& out,
                                            std::optional<py::array>& partials) const {
    const rworker::Worker& open = worker();
    open.check_submit(mini_batch, layer);
    const rworker::RowCount rows = open.row_count(mini_batch, layer);
    const LayerSpec& spec = open.cache().layers()[layer];
    if (spec.state()) {
        check_array(q, {"q", rows.queries, 1, 0});
        check_array(k, {"k", rows.stored, 1, spec.state()->row_elements(rworker::item_bytes(open.model_dtype()))});
        check_array(v, {"v", rows.stored, 1, 0});
    } else {
        check_array(q, {"q", rows.queries, spec.num_heads, spec.sent_query_dim()});
        check_array(k, {"k", rows.stored, spec.num_kv_heads, spec.key_dim});
        check_array(v, {"v", rows.stored, spec.num_kv_heads, spec.stored_value_dim()});
    }
    check_array(out, {"out", rows.out, spec.num_heads, spec.sent_value_dim()});
    if (!out.writeable()) throw Error("out is read-only; it must be writeable");
    if (!partials && rows.partials == 0) return {q.data(), k.data(), v.data(), out.mutable_data()};
    if (!partials) throw Error("partials is None, and this mini-batch has " + std::to_string(rows.partials) + " rows of it");
    check_partials(*partials, rows.partials, spec.partial_heads(), spec.partial_floats());
    if (!partials->writeable()) throw Error("partials is read-only; it must be writeable");
    return {q.data(), k.data(), v.data(), out.mutable_data(), static_cast<float*>(partials->mutable_data())};
}

void PyRWorker::submit(std::int64_t mini_batch, std::int64_t layer, py::array q, py::array k, py::array v,
                       py::array out, std::optional<py::array> partials) {
    worker().submit(mini_batch, layer, checked_payload(mini_batch, layer, q, k, v, out, partials));
    if (std::int64_t(in_use_.size()) <= mini_batch) in_use_.resize(mini_batch + 1);
    in_use_[mini_batch] = {std::move(q), std::move(k), std::move(v), std::move(out)};
    if (partials) in_use_[mini_batch][4] = std::move(*partials);
}

void PyRWorker::run(std::int64_t mini_batch, std::int64_t layer, const py::array& q, const py::array& k,
                    const py::array& v, py::array out, std::optional<py::array> partials) {
    const rworker::Payload payload = checked_payload(mini_batch, layer, q, k, v, out, partials);
    rworker::Worker& open = worker();
    const py::gil_scoped_release unlocked;
    open.run(mini_batch, layer, payload);
}

void PyRWorker::share(std::int64_t mini_batch, std::int64_t layer,
                      const py::array_t<std::int32_t, py::array::c_style>& counts) {
    worker().share(mini_batch, layer, {counts.data(), std::size_t(counts.size())});
}

void PyRWorker::wait(std::int64_t mini_batch) {
    rworker::Worker& open = worker();
    {
        py::gil_scoped_release unlocked;
        open.wait(mini_batch);
    }
    in_use_[mini_batch] = {};
}

py::tuple PyRWorker::end_step() {
    const rworker::StepReport report = worker().end_step();
    const py::ssize_t layers = py::ssize_t(worker().cache().layers().size());
    const std::vector<py::ssize_t> shape{py::ssize_t(report.busy_start.size()) / layers, layers};
    return py::make_tuple(py::array_t<double>(shape, report.busy_start.data()),
                          py::array_t<double>(shape, report.busy_end.data()), report.bytes_read, report.blocks_free);
}

void PyRWorker::abandon_step() {
    rworker::Worker& open = worker();
    {
        py::gil_scoped_release unlocked;
        open.abandon_step();
    }
    in_use_.clear();
}

py::tuple PyRWorker::read_tokens(std::int64_t sequence_id, std::int64_t layer) const {
    if (worker().in_step()) throw Error("read_tokens: a step is open; end_step or abandon_step comes first");
    const rworker::KVCache& cache = worker().cache();
    if (layer < 0 || layer >= std::int64_t(cache.layers().size()))
        throw Error("layer is " + std::to_string(layer) + "; there are " + std::to_string(cache.layers().size()));
    const LayerSpec& spec = cache.layers()[layer];
    const std::int64_t length = cache.sequence(sequence_id).length;
    py::array_t<float> keys({length, spec.num_kv_heads, spec.key_dim});
    py::array_t<float> values({length, spec.num_kv_heads, spec.stored_value_dim()});
    cache.read_tokens(sequence_id, layer, keys.mutable_data(), values.mutable_data());
    return py::make_tuple(keys, values);
}

py::dict PyRWorker::statistics() const {
    const rworker::Statistics found = worker().statistics();
    py::dict named;
    named["blocks_used"] = found.blocks_used;
    named["blocks_free"] = found.blocks_free;
    named["blocks_shared"] = found.blocks_shared;
    named["sequences"] = found.sequences;
    named["incoming"] = found.incoming;
    named["tokens"] = found.tokens;
    named["bytes_read"] = found.bytes_read;
    named["bytes_committed"] = found.bytes_committed;
    return named;
}

void PyRWorker::close() {
    {
        py::gil_scoped_release unlocked;
        worker_.reset();
    }
    in_use_.clear();
}

}  // namespace rworker_binding
