// Makes workers with two layers, and rows for these layers, for the tests of incoming sequences.
#pragma once

#include <string>
#include <vector>

#include "rworker/worker.hpp"

namespace incoming_tests {

using namespace rworker;

constexpr std::int64_t kLayers = 2, kKvHeads = 2, kKeyDim = 20, kValueDim = 12;

inline Worker make_worker(DType kv_dtype, const std::string& isa = "auto", std::int64_t num_blocks = 64) {
    const LayerSpec layer{{4, kKvHeads, kKeyDim, kValueDim, 0.25f, 0, 0.0f, {}}};
    return Worker({std::vector<LayerSpec>(kLayers, layer), DType::float32, kv_dtype, 32, num_blocks, 2, {}, isa});
}

/// Rows of one sequence in one layer. Each `seed` gives different rows.
struct Data {
    std::vector<float> keys, values;

    Data(std::int64_t num_tokens, std::int64_t seed) {
        const auto fill = [&](std::vector<float>& floats, std::int64_t dim) {
            floats.resize(num_tokens * kKvHeads * dim);
            for (std::size_t i = 0; i < floats.size(); ++i)
                floats[i] = float((i + seed * 131) * 7919 % 1009) / 500.0f - 1.0f;
        };
        fill(keys, kKeyDim), fill(values, kValueDim);
    }
    IncomingRows rows(std::int64_t start, std::int64_t end) const {
        return {keys.data() + start * kKvHeads * kKeyDim, values.data() + start * kKvHeads * kValueDim, start,
                end - start, DType::float32};
    }
};

inline void control(Worker& worker, std::vector<Control> controls) {
    worker.begin_step(controls, std::vector<std::vector<Span>>{});
    worker.end_step();
}

/// Appends tokens [begin, end), which do not attend.
inline void append(Worker& worker, std::int64_t sequence_id, const std::vector<Data>& layers, std::int64_t begin,
                   std::int64_t end) {
    worker.begin_step({}, std::vector<std::vector<Span>>{{{sequence_id, begin, end - begin, SpanMode::append}}});
    for (std::int64_t layer = 0; layer < kLayers; ++layer) {
        const IncomingRows rows = layers[layer].rows(begin, end);
        worker.run(0, layer, {nullptr, rows.keys, rows.values, nullptr});
    }
    worker.end_step();
}

inline std::vector<std::uint8_t> exported(Worker& worker, std::int64_t sequence_id) {
    const std::int64_t length = worker.cache().sequence(sequence_id).length;
    std::vector<std::uint8_t> bytes(worker.export_bytes(sequence_id, 0, length));
    worker.export_sequence(sequence_id, 0, length, bytes.data());
    return bytes;
}

}  // namespace incoming_tests
