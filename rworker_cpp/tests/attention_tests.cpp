// Every instruction set and dtype against a naive double-precision oracle.
#include <algorithm>
#include <cmath>
#include <random>
#include <string_view>
#include <vector>

#include "check.hpp"
#include "rworker/kernel_choice.hpp"
#include "rworker/worker.hpp"

using namespace rworker;

namespace {

constexpr std::int64_t kAttendedRows = 60, kChecked = 9;
#ifdef __SANITIZE_THREAD__
constexpr bool kChecksOutputs = false;  // the address sanitizer's build checks this arithmetic of one thread
#else
constexpr bool kChecksOutputs = true;
#endif

std::vector<float> random_floats(std::mt19937& random, std::int64_t count) {
    std::normal_distribution<float> normal;
    std::vector<float> floats(count);
    for (float& x : floats) x = normal(random);
    return floats;
}

/// One query row against tokens [begin, end) of keys and values [token][kv head][dim].
std::vector<double> oracle(const LayerSpec& layer, const float* query, const float* keys, const float* values,
                           std::int64_t begin, std::int64_t end, std::int64_t head) {
    const std::int64_t kv_head = head / layer.group();
    std::vector<double> output(layer.value_dim);
    double max = -INFINITY, sum = 0;
    std::vector<double> scores;
    for (std::int64_t t = begin; t < end; ++t) {
        double score = 0;
        for (std::int64_t d = 0; d < layer.key_dim; ++d)
            score += double(query[d]) * layer.scale * keys[(t * layer.num_kv_heads + kv_head) * layer.key_dim + d];
        if (layer.soft_cap != 0.0f) score = layer.soft_cap * std::tanh(score / layer.soft_cap);
        if (!layer.alibi_slopes.empty()) score += double(layer.alibi_slopes[head]) * double(t + 1 - end);
        scores.push_back(score);
        max = std::max(max, score);
    }
    for (std::int64_t t = begin; t < end; ++t) {
        const double weight = std::exp(scores[t - begin] - max);
        sum += weight;
        for (std::int64_t d = 0; d < layer.value_dim; ++d)
            output[d] += weight * values[(t * layer.num_kv_heads + kv_head) * layer.value_dim + d];
    }
    for (double& x : output) x /= sum;
    return output;
}

/// Largest norm-wise relative error of a row. Some paths round queries and weights to the cache's 16 bits, or to bytes.
double tolerance(std::string_view isa, DType kv_dtype, std::int64_t group) {
    if (kv_dtype == DType::bfloat16) return 1e-2;
    if (is_for_bytes(kv_dtype, group)) return 3e-2;
    if (is_quantized(kv_dtype)) return 3e-3;
    return kv_dtype == DType::float16 && isa == "neon_bf16" ? 1e-3 : 1e-5;
}

/// About kChecked of the rows, the last among them, and of the heads; the oracle is slow under a sanitizer.
void check_outputs(const Worker& worker, const std::vector<float>& queries, const std::vector<float>& out,
                   std::int64_t context, std::int64_t num_rows, double most) {
    const LayerSpec& layer = worker.cache().layers()[0];
    std::vector<float> keys((context + num_rows) * layer.num_kv_heads * layer.key_dim);
    std::vector<float> values((context + num_rows) * layer.num_kv_heads * layer.value_dim);
    worker.cache().read_tokens(1, 0, keys.data(), values.data());
    for (std::size_t i = 0; layer.values_in_keys() && i < values.size(); ++i)
        values[i] = keys[i / layer.value_dim * layer.key_dim + i % layer.value_dim];
    const std::int64_t stride = 1 + num_rows / kChecked, head_stride = 1 + layer.num_heads / kChecked;
    for (std::int64_t row = num_rows - 1; row >= 0; row -= stride)
        for (std::int64_t head = 0; head < layer.num_heads; head += head_stride) {
            const std::int64_t end = context + row + 1, most = layer.window ? layer.window : end;
            const std::int64_t begin = layer.chunked ? (end - 1) / most * most : std::max<std::int64_t>(0, end - most);
            const auto want = oracle(layer, &queries[(row * layer.num_heads + head) * layer.key_dim], keys.data(),
                                     values.data(), begin, end, head);
            double error = 0, norm = 0;
            for (std::int64_t d = 0; d < layer.value_dim; ++d) {
                error += std::pow(out[(row * layer.num_heads + head) * layer.value_dim + d] - want[d], 2);
                norm += want[d] * want[d];
            }
            CHECK(std::sqrt(error / norm) < most);
        }
}

void test_attend(const char* isa, DType kv_dtype, const LayerSpec& layer, std::int64_t context, std::int64_t num_rows) {
    Worker worker({{layer}, DType::float32, kv_dtype, 32, 128, 2, {}, isa});
    std::mt19937 random(7);
    const std::int64_t appended = std::max<std::int64_t>(0, context - kAttendedRows);  // which is sooner done
    const std::int64_t counts[] = {appended, context - appended, num_rows};
    std::int64_t length = 0;
    for (const std::int64_t rows : counts) {
        if (rows == 0) continue;
        const bool attends = length >= appended;
        const auto queries = random_floats(random, rows * layer.num_heads * layer.key_dim);
        const auto keys = random_floats(random, rows * layer.num_kv_heads * layer.key_dim);
        const auto values = random_floats(random, rows * layer.num_kv_heads * layer.value_dim);
        std::vector<float> out(rows * layer.num_heads * layer.value_dim);
        const SpanMode mode = attends ? SpanMode::attend : SpanMode::append;
        worker.begin_step({}, std::vector<std::vector<Span>>{{{1, length, rows, mode}}});
        worker.submit(0, 0, {queries.data(), keys.data(), values.data(), out.data()});
        worker.wait(0);
        worker.end_step();
        if (attends && kChecksOutputs)
            check_outputs(worker, queries, out, length, rows, tolerance(isa, kv_dtype, layer.group()));
        length += rows;
    }
}

/// Outputs of the last layer for some steps of two sequences; an index, where there is one, has random queries and keys.
std::vector<float> last_outputs(const char* isa, DType dtype, const std::vector<LayerSpec>& layers) {
    Worker worker({layers, DType::float32, dtype, 16, 128, 3, {}, isa});
    std::vector<float> all;
    const std::vector<std::vector<Span>> steps[] = {{{{1, 0, 37, SpanMode::attend}, {2, 0, 530, SpanMode::append}}},
                                                    {{{1, 37, 1, SpanMode::attend}, {2, 530, 5, SpanMode::attend}}}};
    for (const auto& spans : steps) {
        worker.begin_step({}, spans);
        for (std::size_t i = 0; i < layers.size(); ++i) {
            std::mt19937 random(layers.size() - i);  // the same for the last layer, whatever is before it
            const LayerSpec& layer = layers[i];
            const RowCount rows = worker.row_count(0, std::int64_t(i));
            const auto queries = random_floats(random, rows.queries * layer.num_heads * layer.query_dim());
            const auto keys = random_floats(random, rows.stored * layer.num_kv_heads * layer.key_dim);
            const auto values = random_floats(random, rows.stored * layer.num_kv_heads * layer.stored_value_dim());
            std::vector<float> out(rows.out * layer.num_heads * layer.value_dim);
            worker.submit(0, std::int64_t(i), {queries.data(), keys.data(), values.data(), out.data()});
            worker.wait(0);
            if (i + 1 == layers.size()) all.insert(all.end(), out.begin(), out.end());
        }
        worker.end_step();
    }
    return all;
}

/// Where an index picks all tokens, its layer has the bits it has without; where it picks fewer, others.
void test_picks(const char* isa, DType dtype) {
    LayerSpec latent{{3, 1, 40, 24, 0.2f, 0, 0.0f, {}}, Latent{}}, heads{{4, 2, 16, 16, 0.2f, 0, 0.0f, {}}};
    LayerSpec tokens{{20, 1, 16, 1, 0.2f, 0, 0.0f, {}}, Index{20}}, blocks{{2, 1, 16, 1, 1.0f, 0, 0.0f, {}}, Index{2, 16, 1}};
    for (auto [layer, index] : {std::pair(latent, tokens), std::pair(heads, blocks)}) {
        const std::vector<float> wanted = last_outputs(isa, dtype, {layer});
        layer.picked_by = 0;
        CHECK(last_outputs(isa, dtype, {index, layer}) != wanted);
        std::get<Index>(index.kind).picks = 1000;
        CHECK(last_outputs(isa, dtype, {index, layer}) == wanted);
    }
}

}  // namespace

void run_attention_tests() {
#ifdef __SANITIZE_THREAD__  // threads do the same for all
    const std::initializer_list<DType> dtypes = {DType::bfloat16, DType::int4};
#else
    const std::initializer_list<DType> dtypes = {DType::float32, DType::float16, DType::bfloat16, DType::int8, DType::int4};
#endif
    for (const Kernels* kernels : supported_kernels())
        for (const DType dtype : dtypes) {
            test_attend(kernels->isa, dtype, {4, 2, 64, 64, 0.125f, 0, 0.0f, {}}, 70, 1);
            test_attend(kernels->isa, dtype, {5, 1, 24, 40, 0.2f, 100, 3.0f, {}}, 530, 3);
            test_attend(kernels->isa, dtype, {3, 3, 7, 5, 0.4f, 9, 0.0f, {}}, 33, 40);
            test_attend(kernels->isa, dtype, {6, 2, 32, 16, 0.2f, 0, 0.0f, {}, {1, 0.5f, 0.1f, 0.02f, 0, -0.01f}}, 520, 13);
            test_attend(kernels->isa, dtype, {8, 1, 200, 136, 0.07f, 0, 0.0f, {}}, 60, 9);
            test_attend(kernels->isa, dtype, {{5, 1, 24, 40, 0.2f, 96, 0.0f, {}, {}, true}}, 530, 24);
            test_attend(kernels->isa, dtype, {{9, 1, 72, 58, 0.1f, 0, 0.0f, {}}, Latent{}}, 540, 7);
            test_attend(kernels->isa, dtype, {{32, 1, 24, 16, 0.2f, 0, 0.0f, {}}, Latent{}}, 490, 34);  // cut
            if (dtype == DType::float32 || dtype == DType::bfloat16) test_picks(kernels->isa, dtype);
        }
}
