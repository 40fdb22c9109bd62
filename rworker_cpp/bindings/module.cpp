#include <pybind11/stl.h>

#include <optional>

#include "rworker/kernel_choice.hpp"
#include "rworker/peaks.hpp"
#include "rworker/self_test.hpp"
#include "rworker_binding.hpp"

namespace py = pybind11;
using rworker_binding::PyRWorker;

namespace {

std::vector<std::string> supported_isas() {
    std::vector<std::string> names;
    for (const rworker::Kernels* kernels : rworker::supported_kernels()) names.emplace_back(kernels->isa);
    return names;
}

/// None if there is no difference.
std::optional<std::string> self_test(const std::string& isa) {
    const std::string refusal = rworker::self_test(isa);
    return refusal.empty() ? std::nullopt : std::optional(refusal);
}

void register_errors() {
    // rworker::Error is a std::invalid_argument, which pybind11 raises as ValueError.
    py::register_exception_translator([](std::exception_ptr error) {
        try {
            std::rethrow_exception(error);
        } catch (const rworker::UnknownSequence& unknown) {
            PyErr_SetString(PyExc_KeyError, unknown.what());
        }
    });
}

void bind_properties(py::class_<PyRWorker>& cls) {
    cls.def_property_readonly("isa", [](const PyRWorker& self) { return self.worker().kernels().isa; });
    cls.def_property_readonly("num_threads", [](const PyRWorker& self) { return self.worker().num_threads(); });
    cls.def_property_readonly("state_blocks",
                              [](const PyRWorker& self) { return self.worker().cache().states().num_blocks(); });
    cls.def_property_readonly("num_blocks",
                              [](const PyRWorker& self) { return self.worker().cache().pool().num_blocks(); });
    cls.def_property_readonly("block_size", [](const PyRWorker& self) { return self.worker().cache().block_size(); });
    cls.def_property_readonly("block_bytes", [](const PyRWorker& self) { return self.worker().cache().block_bytes(); });
    cls.def_property_readonly("blocks_free",
                              [](const PyRWorker& self) { return self.worker().cache().pool().num_free(); });
    cls.def_property_readonly("blocks_touched", [](const PyRWorker& self) { return self.worker().cache().pool().num_touched(); });
    cls.def_property_readonly("blocks_used", [](const PyRWorker& self) {
        const rworker::BlockPool& pool = self.worker().cache().pool();
        return pool.num_blocks() - pool.num_free();
    });
}

void bind_step(py::class_<PyRWorker>& cls) {
    cls.def("set_weights", &PyRWorker::set_weights, py::arg("layer"), py::arg("first_head"), py::arg("rows").noconvert());
    cls.def("begin_step", &PyRWorker::begin_step, py::arg("controls").noconvert(), py::arg("mini_batches").noconvert());
    cls.def("submit", &PyRWorker::submit, py::arg("mini_batch"), py::arg("layer"), py::arg("q").noconvert(),
            py::arg("k").noconvert(), py::arg("v").noconvert(), py::arg("out").noconvert(),
            py::arg("partials").noconvert() = py::none());
    cls.def("run", &PyRWorker::run, py::arg("mini_batch"), py::arg("layer"), py::arg("q").noconvert(),
            py::arg("k").noconvert(), py::arg("v").noconvert(), py::arg("out").noconvert(),
            py::arg("partials").noconvert() = py::none());
    cls.def("share", &PyRWorker::share, py::arg("mini_batch"), py::arg("layer"), py::arg("counts").noconvert());
    cls.def("ready", &PyRWorker::ready, py::arg("mini_batch"));
    cls.def("wait", &PyRWorker::wait, py::arg("mini_batch"));
    cls.def("weigh", &PyRWorker::weigh, py::kw_only(), py::arg("sequence_id"), py::arg("position"), py::arg("offset"),
            py::arg("block"), py::arg("layers"), py::arg("queries").noconvert(), py::arg("norms").noconvert() = py::none(),
            py::arg("finds_norms") = false);
    cls.def("end_step", &PyRWorker::end_step);
    cls.def("abandon_step", &PyRWorker::abandon_step);
}

void bind_tables(py::class_<PyRWorker>& cls) {
    cls.def(
        "sequence_length",
        [](const PyRWorker& self, std::int64_t id) { return self.worker().cache().sequence(id).length; },
        py::arg("sequence_id"));
    cls.def(
        "least_length",
        [](const PyRWorker& self, std::int64_t id) { return self.worker().cache().least_length(id); },
        py::arg("sequence_id"));
    cls.def(
        "block_table", [](const PyRWorker& self, std::int64_t id) { return self.worker().cache().sequence(id).blocks; },
        py::arg("sequence_id"));
    cls.def("sequence_ids", [](const PyRWorker& self) { return self.worker().cache().sequence_ids(); });
    cls.def("incoming_ids", [](const PyRWorker& self) { return self.worker().cache().incoming_ids(); });
    cls.def("export", &PyRWorker::export_sequence, py::arg("sequence_id"), py::arg("start") = 0,
            py::arg("num_tokens") = py::none());
    cls.def("import_", &PyRWorker::import_sequence, py::arg("sequence_id"), py::arg("num_tokens"),
            py::arg("data").noconvert(), py::arg("start") = 0);
    cls.def("check_store", &PyRWorker::check_store, py::arg("job_id"), py::arg("layer"), py::arg("start"),
            py::arg("num_rows"));
    cls.def("store", &PyRWorker::store, py::arg("job_id"), py::arg("layer"), py::arg("start"),
            py::arg("k").noconvert(), py::arg("v").noconvert());
    cls.def("store_state", &PyRWorker::store_state, py::arg("job_id"), py::arg("layer"), py::arg("data").noconvert());
    cls.def("read_prefix", &PyRWorker::read_prefix, py::arg("job_id"), py::arg("layer"), py::arg("start"),
            py::arg("num_rows"));
    cls.def(
        "commit_ahead", [](PyRWorker& self, std::int64_t least) { self.worker().commit_ahead(least); },
        py::arg("least") = 0);
    cls.def("statistics", &PyRWorker::statistics);
    cls.def("read_tokens", &PyRWorker::read_tokens, py::arg("sequence_id"), py::arg("layer"));
}

void bind_peaks(py::module_& module) {
    module.def("read_peak", &rworker::read_peak, py::arg("num_threads"), py::arg("num_bytes"), py::arg("repeats"),
               py::call_guard<py::gil_scoped_release>());
    py::class_<rworker::Peaks> cls(module, "Peaks");
    cls.def(py::init<int, std::int64_t, std::vector<int>, const std::string&>(), py::kw_only(), py::arg("num_threads"),
            py::arg("num_bytes"), py::arg("cores") = std::vector<int>{}, py::arg("isa") = "auto");
    cls.def("read", &rworker::Peaks::read, py::call_guard<py::gil_scoped_release>());
    cls.def(
        "read_scattered",
        [](rworker::Peaks& self, std::int64_t piece_bytes, const std::optional<std::string>& read_ahead) {
            std::optional<rworker::ReadAhead> ask;
            if (read_ahead) ask = rworker::parse_read_ahead(*read_ahead);
            const py::gil_scoped_release unlocked;
            return self.read_scattered(piece_bytes, ask);
        },
        py::kw_only(), py::arg("piece_bytes"), py::arg("read_ahead"));
    cls.def(
        "multiply_add",
        [](rworker::Peaks& self, const std::string& kv_dtype) {
            const rworker::MultiplyAddKind kind = rworker::multiply_add_kind(rworker::parse_kv_dtype(kv_dtype));
            const py::gil_scoped_release unlocked;
            return self.multiply_add(kind);
        },
        py::kw_only(), py::arg("kv_dtype"));
}

}  // namespace

PYBIND11_MODULE(_rworker, module) {
    register_errors();
    module.def("supported_isas", &supported_isas);
    module.def("self_test", &self_test, py::arg("isa"), py::call_guard<py::gil_scoped_release>());
    bind_peaks(module);
    rworker_binding::bind_ring(module);
    rworker_binding::bind_merge(module);
    module.def("block_bytes", &PyRWorker::block_bytes, py::arg("layers"), py::arg("kv_dtype"), py::arg("block_size"));
    module.def("state_blocks", &PyRWorker::state_blocks, py::arg("layers"), py::arg("kv_dtype"), py::arg("block_size"));
    py::class_<PyRWorker> cls(module, "RWorker");
    cls.def(py::init<const py::list&, const std::string&, const std::string&, std::int64_t, std::int64_t, int,
                     std::vector<int>, const std::string&, const std::string&>(),
            py::kw_only(), py::arg("layers"), py::arg("model_dtype"), py::arg("kv_dtype"), py::arg("block_size"),
            py::arg("num_blocks"), py::arg("num_threads"), py::arg("cores") = std::vector<int>{},
            py::arg("isa") = "auto", py::arg("read_ahead") = "run");
    bind_properties(cls);
    bind_step(cls);
    bind_tables(cls);
    rworker_binding::bind_audits(cls);
    rworker_binding::bind_blocks(module, cls);
    cls.def("close", &PyRWorker::close);
}
