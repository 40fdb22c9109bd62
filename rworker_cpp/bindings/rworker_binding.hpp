// The R-worker's Python class. It checks arrays, and keeps them alive while a job uses them.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <array>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "rworker/worker.hpp"

namespace rworker_binding {

namespace py = pybind11;

class PyRWorker {
  public:
    PyRWorker(const py::list& layers, const std::string& model_dtype, const std::string& kv_dtype,
              std::int64_t block_size, std::int64_t num_blocks, int num_threads, std::vector<int> cores,
              const std::string& isa, const std::string& read_ahead);
    ~PyRWorker() { close(); }

    static std::int64_t block_bytes(const py::list& layers, const std::string& kv_dtype, std::int64_t block_size);
    static std::int64_t state_blocks(const py::list& layers, const std::string& kv_dtype, std::int64_t block_size);

    void set_weights(std::int64_t layer, std::int64_t first_head, const py::array& rows);
    void begin_step(const py::array& controls, const std::vector<py::array>& mini_batches);
    void submit(std::int64_t mini_batch, std::int64_t layer, py::array q, py::array k, py::array v, py::array out,
                std::optional<py::array> partials);
    void run(std::int64_t mini_batch, std::int64_t layer, const py::array& q, const py::array& k, const py::array& v,
             py::array out, std::optional<py::array> partials);
    void share(std::int64_t mini_batch, std::int64_t layer,
               const py::array_t<std::int32_t, py::array::c_style>& counts);
    bool ready(std::int64_t mini_batch) const { return worker().ready(mini_batch); }
    void wait(std::int64_t mini_batch);
    py::tuple end_step();
    void abandon_step();
    py::array_t<float> weigh(std::int64_t sequence_id, std::int64_t position, std::int64_t offset, std::int64_t block,
                             const std::vector<std::int64_t>& layers, const std::vector<py::array>& queries,
                             const std::optional<py::array>& norms, bool finds_norms);
    py::array attend_again(std::int64_t sequence_id, std::int64_t layer, std::int64_t position, std::int64_t mode,
                           const py::array& query);
    py::tuple read_tokens(std::int64_t sequence_id, std::int64_t layer) const;
    py::array_t<std::uint8_t> export_sequence(std::int64_t sequence_id, std::int64_t start,
                                              std::optional<std::int64_t> most);
    void import_sequence(std::int64_t sequence_id, std::int64_t num_tokens, const py::array& data, std::int64_t start);
    /// Any thread may call these three, even while another one closes the R-worker.
    void check_store(std::int64_t job_id, std::int64_t layer, std::int64_t start, std::int64_t num_rows) const;
    void store(std::int64_t job_id, std::int64_t layer, std::int64_t start, const py::array& k, const py::array& v);
    void store_state(std::int64_t job_id, std::int64_t layer, const py::array_t<std::uint8_t, py::array::c_style>& data);
    py::array_t<std::uint8_t> read_prefix(std::int64_t job_id, std::int64_t layer, std::int64_t start,
                                          std::int64_t num_rows) const;
    py::dict statistics() const;
    void close();

    /// Throws Error after close.
    rworker::Worker& worker() const;

  private:
    const std::shared_ptr<rworker::Worker>& shared_worker() const;
    struct Shape {
        const char* name;
        py::ssize_t rows, heads, dim;
    };
    void check_array(const py::array& array, const Shape& shape) const;
    rworker::Payload checked_payload(std::int64_t mini_batch, std::int64_t layer, const py::array& q,
                                     const py::array& k, const py::array& v, py::array& out,
                                     std::optional<py::array>& partials) const;

    std::shared_ptr<rworker::Worker> worker_;  // shared with the stores of other threads
    std::vector<std::array<py::object, 5>> in_use_;  // per mini-batch: the arrays of its running job
};

/// Reads layers from records of fastdecode.kinds. Throws Error that names a missing field.
std::vector<rworker::LayerSpec> parse_layers(const py::list& layers);

/// Returns dtype and shape, for messages.
std::string describe(const py::array& array);

/// Returns the bytes of a C-contiguous uint8 array of one dimension. Throws Error for others.
std::span<const std::uint8_t> bytes_of(const py::array& data);

/// Throws Error unless partial results are float32 [rows, num_heads, 2 + value_dim]. A negative `rows` or `num_heads`
/// allows any number.
void check_partials(const py::array& partials, std::int64_t rows, std::int64_t num_heads, std::int64_t floats);

/// Whole blocks as they lie in the cache, and the checksum of bytes: see the stub.
void bind_blocks(py::module_& module, py::class_<PyRWorker>& cls);

/// Attention computed again, and checksums of blocks: see the stub.
void bind_audits(py::class_<PyRWorker>& cls);

/// Partial results of ranges, merged on the S-worker: see the stub.
void bind_merge(py::module_& module);

/// rworker::Ring, over the memory of a numpy array.
void bind_ring(py::module_& module);

}  // namespace rworker_binding
