// How a query's attention is distributed over blocks of tokens: see the stub.
#include <pybind11/stl.h>

#include "rworker/weigh_job.hpp"
#include "rworker_binding.hpp"

namespace rworker_binding {

py::array_t<float> PyRWorker::weigh(std::int64_t sequence_id, std::int64_t position, std::int64_t offset,
                                    std::int64_t block, const std::vector<std::int64_t>& layers,
                                    const std::vector<py::array>& queries, const std::optional<py::array>& norms,
                                    bool finds_norms) {
    rworker::Worker& open = worker();
    const std::vector<rworker::LayerSpec>& specs = open.cache().layers();
    rworker::WeighQuery query{sequence_id, position, offset, block, layers, {}};
    for (std::size_t i = 0; i < queries.size(); ++i) {
        if (i >= layers.size() || layers[i] < 0 || layers[i] >= std::int64_t(specs.size()) || specs[layers[i]].state())
            throw rworker::Error("weigh: queries[" + std::to_string(i) + "] is of no layer that has queries");
        check_array(queries[i], {"queries", 1, specs[layers[i]].num_heads, specs[layers[i]].sent_query_dim()});
        query.queries.push_back(queries[i].data());
    }
    if (norms) {
        check_partials(*norms, 1, -1, 2);
        query.norms = static_cast<const float*>(norms->data());
    }
    std::unique_ptr<rworker::WeighJob> job;
    {
        const py::gil_scoped_release unlocked;
        job = std::make_unique<rworker::WeighJob>(open, query);
    }
    if (norms && norms->shape(1) != job->num_heads())
        throw rworker::Error("weigh: norms of " + std::to_string(norms->shape(1)) + " heads, and the layers have " +
                             std::to_string(job->num_heads()));
    const std::vector<py::ssize_t> heads{1, job->num_heads(), 2}, blocks{job->num_blocks()};
    py::array_t<float> found(finds_norms ? heads : blocks);
    float* const out = found.mutable_data();
    const py::gil_scoped_release unlocked;
    finds_norms ? job->find_norms(out) : job->weigh(out);
    return found;
}

}  // namespace rworker_binding
