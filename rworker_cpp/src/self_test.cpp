#include "rworker/self_test.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string_view>
#include <vector>

#include "rworker/kernel_choice.hpp"
#include "rworker/state_self_test.hpp"
#include "rworker/kv_cache.hpp"
#include "rworker/values_of_keys.hpp"

namespace rworker {
namespace {

constexpr std::int64_t kSequence = 1, kBlockSize = 32;

/// A layer with one KV head, `length` tokens in its cache, and query rows of the last `num_rows` of them.
struct Case {
    const char* name;
    LayerSpec layer;
    std::int64_t length, num_rows;
};

const Case kCases[] = {
    {"groups of 5 with ALiBi over two splits",
     {{5, 1, 72, 40, 0.12f, 0, 0.0f, {}, {0.3f, 0.1f, 0.03f, 0.01f, 0.0f}}},
     531,
     2},
    {"groups of 6 over two splits", {{6, 1, 72, 40, 0.12f, 0, 0.0f, {}}}, 531, 1},
    {"one query row with a window, a soft cap and a sink", {{1, 1, 128, 130, 0.09f, 50, 3.0f, {0.5f}}}, 79, 1},
    {"many query rows of small heads", {{3, 1, 7, 5, 0.4f, 0, 0.0f, {}}}, 33, 20},
};

constexpr const char* kDTypeNames[] = {"float32", "float16", "bfloat16", "int8", "int4"};

/// Largest difference of an output element, relative to the row's root mean square. Some paths round queries and
/// weights to 16 bits or to bytes, and integer paths to about 12 bits.
float tolerance(const Kernels& tested, DType kv_dtype, std::int64_t group) {
    if (kv_dtype == DType::bfloat16 || is_for_bytes(kv_dtype, group)) return 5e-2f;
    if (is_quantized(kv_dtype)) return 1e-2f;
    return kv_dtype == DType::float16 && tested.isa == std::string_view("neon_bf16") ? 1e-2f : 1e-4f;
}

struct Rows {
    std::vector<float> queries, keys, values;

    explicit Rows(const Case& of) {
        std::minstd_rand random(20240521);
        const auto fill = [&random](std::vector<float>& floats, std::int64_t count) {
            floats.resize(std::size_t(count));
            for (float& x : floats) x = float(random() % 4001) / 1000.0f - 2.0f;
        };
        fill(queries, of.num_rows * of.layer.num_heads * of.layer.key_dim);
        fill(keys, of.length * of.layer.key_dim);
        fill(values, of.length * of.layer.value_dim);
    }
};

/// The cache of one path in one case.
class Subject {
  public:
    Subject(const Kernels& kernels, const Case& of, DType dtype)
        : kernels_(kernels), case_(of), cache_({of.layer}, dtype, kBlockSize, of.length / kBlockSize + 1) {}

    /// Stores the tokens in pieces that end within tiles and at the ends of tiles.
    void append(const Rows& rows) {
        cache_.begin_step({}, std::vector<Span>{{kSequence, 0, case_.length, SpanMode::attend}});
        for (std::int64_t begin = 0; begin < case_.length;) {
            const std::int64_t end = std::min(case_.length, begin == 0 ? 21 : begin == 21 ? 32 : case_.length);
            append_piece(rows, begin, end);
            begin = end;
        }
        cache_.commit_step();
    }

    std::vector<std::uint8_t> exported() const {
        std::vector<std::uint8_t> bytes(std::size_t(cache_.sequence_bytes(case_.length)));
        cache_.export_sequence(kSequence, 0, case_.length, bytes.data());
        return bytes;
    }

    void import(const std::vector<std::uint8_t>& bytes) { cache_.import_sequence(kSequence, 0, case_.length, bytes); }

    /// float32 [num_rows, num_heads, value_dim].
    std::vector<float> attend(const Rows& rows, ReadAhead read_ahead) const {
        const LayerSpec& layer = case_.layer;
        const std::int64_t num_splits = (case_.length + kSplitTokens - 1) / kSplitTokens;
        const std::int64_t stride = layer.num_heads * partial_floats(layer.value_dim);
        std::vector<TokenRow> tokens;
        for (std::int64_t row = 0; row < case_.num_rows; ++row) {
            const std::int64_t position = case_.length - case_.num_rows + row;
            tokens.push_back({position, std::int32_t(row), 0, row * num_splits, layer.first_seen(position)});
        }
        std::vector<float> partials(std::size_t(case_.num_rows * num_splits * stride));
        std::vector<float> scratch(std::size_t(scratch_floats(layer.key_dim, layer.value_dim)));
        std::vector<float> out(std::size_t(case_.num_rows * layer.num_heads * layer.value_dim));
        for (std::int64_t split = 0; split < num_splits; ++split)
            attend_split(rows, tokens, split, read_ahead, partials.data(), stride, scratch.data());
        kernels_.merge({.partials = partials.data(),
                        .first_split = 0,
                        .num_splits = num_splits,
                        .partial_stride = stride,
                        .num_tokens = case_.num_rows,
                        .token_stride = layer.num_heads * layer.value_dim,
                        .group = int(layer.num_heads),
                        .value_dim = int(layer.value_dim),
                        .sinks = layer.sinks.empty() ? nullptr : layer.sinks.data(),
                        .dtype = DType::float32,
                        .out = out.data(),
                        .scratch = scratch.data()});
        return out;
    }

  private:
    HeadView view() const { return cache_.view(0, 0, cache_.sequence(kSequence).blocks.data()); }

    void append_piece(const Rows& rows, std::int64_t begin, std::int64_t end) {
        const LayerSpec& layer = case_.layer;
        kernels_.append[int(cache_.dtype())]({.view = view(),
                                              .dtype = DType::float32,
                                              .keys = rows.keys.data() + begin * layer.key_dim,
                                              .values = rows.values.data() + begin * layer.value_dim,
                                              .key_stride = layer.key_dim,
                                              .value_stride = layer.value_dim,
                                              .begin = begin,
                                              .end = end,
                                              .key_dim = int(layer.key_dim),
                                              .value_dim = int(layer.value_dim)});
    }

    void attend_split(const Rows& rows, const std::vector<TokenRow>& tokens, std::int64_t split, ReadAhead read_ahead,
                      float* partials, std::int64_t stride, float* scratch) const {
        const LayerSpec& layer = case_.layer;
        kernels_.attend[int(cache_.dtype())]({.view = view(),
                                              .dtype = DType::float32,
                                              .queries = rows.queries.data(),
                                              .tokens = tokens.data(),
                                              .num_tokens = case_.num_rows,
                                              .token_stride = layer.num_heads * layer.key_dim,
                                              .group = int(layer.num_heads),
                                              .split = split,
                                              .end = std::min(case_.length, (split + 1) * kSplitTokens),
                                              .scale = layer.scale,
                                              .soft_cap = layer.soft_cap,
                                              .alibi_slopes =
                                                  layer.alibi_slopes.empty() ? nullptr : layer.alibi_slopes.data(),
                                              .key_dim = int(layer.key_dim),
                                              .value_dim = int(layer.value_dim),
                                              .partials = partials,
                                              .partial_stride = stride,
                                              .next = nullptr,
                                              .read_ahead = read_ahead,
                                              .scratch = scratch});
    }

    const Kernels& kernels_;
    const Case& case_;
    KVCache cache_;
};

/// Returns whether each row of `got` is within the tolerance of `want`'s row; NaN is not.
bool close(const std::vector<float>& got, const std::vector<float>& want, std::int64_t row_floats, float tolerance) {
    for (std::size_t row = 0; row < want.size(); row += std::size_t(row_floats)) {
        float squares = 0.0f, largest = 0.0f;
        for (std::int64_t i = 0; i < row_floats; ++i) {
            const float difference = std::fabs(got[row + i] - want[row + i]);
            squares += want[row + i] * want[row + i];
            largest = difference <= largest ? largest : difference;  // a NaN stays
        }
        if (!(largest <= tolerance * std::sqrt(squares / float(row_floats)))) return false;
    }
    return true;
}

std::string find_difference(const Kernels& tested, const Kernels& oracle, const Case& of, DType dtype) {
    const std::string where = std::string(" of a ") + kDTypeNames[int(dtype)] + " cache (" + of.name + ")";
    const Rows rows(of);
    Subject right(oracle, of, dtype), subject(tested, of, dtype), moved(tested, of, dtype);
    right.append(rows), subject.append(rows);
    const std::vector<std::uint8_t> stored = right.exported();
    if (subject.exported() != stored) return "what append stores" + where;
    const std::vector<float> output = subject.attend(rows, ReadAhead::run);
    const std::vector<float> wanted = right.attend(rows, ReadAhead::run);
    const float most = tolerance(tested, dtype, of.layer.num_heads / of.layer.num_kv_heads);
    if (!close(output, wanted, of.layer.value_dim, most)) return "the attention" + where;
    moved.import(stored);
    if (moved.attend(rows, ReadAhead::pages) != output) return "the attention after export and import" + where;
    return "";
}

/// Compares latent rows of codes, and the tiles that are made of them.
std::vector<std::uint8_t> latent_bytes(const Kernels& kernels, DType dtype) {
    constexpr std::int64_t kTokens = 37, kTiles = 3;
    constexpr std::int32_t kFirstBlock = 0;
    const LayerSpec layer{{1, 1, 72, 58, 0.1f, 0, 0.0f, {}}, Latent{}};
    const Rows rows({"latent rows", layer, kTokens, 1});
    const std::int64_t rows_bytes = kTiles * kTileTokens * token_bytes(layer, dtype);
    const LayerLayout tiles(layer, DType::float32, kSplitTokens, 0);
    std::vector<std::uint8_t> memory(std::size_t(rows_bytes + 2 * tiles.head_bytes));
    HeadView view{};
    view.base = memory.data(), view.blocks = &kFirstBlock;
    view.key_tile_bytes = rows_bytes / kTiles, view.log2_tiles_per_block = 2;
    kernels.append[append_index(layer, dtype)]({.view = view,
                                                .dtype = DType::float32,
                                                .keys = rows.keys.data(),
                                                .values = nullptr,
                                                .key_stride = layer.key_dim,
                                                .value_stride = 0,
                                                .begin = 0,
                                                .end = kTokens,
                                                .key_dim = int(layer.key_dim),
                                                .value_dim = 0,
                                                .latent_dim = int(layer.value_dim)});
    read_split(kernels, layer, dtype, DType::float32, {view, 0, kTokens}, memory.data() + rows_bytes);
    return memory;
}

}  // namespace

std::string find_difference(const Kernels& tested, const Kernels& oracle) {
    for (const DType dtype : {DType::int8, DType::int4})
        if (latent_bytes(tested, dtype) != latent_bytes(oracle, dtype))
            return std::string("what is made of latent rows of a ") + kDTypeNames[int(dtype)] + " cache";
    for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16, DType::int8, DType::int4})
        for (const Case& of : kCases) {
            const std::string difference = find_difference(tested, oracle, of, dtype);
            if (!difference.empty()) return difference;
        }
    return find_difference(state_kernels(tested), state_kernels(oracle));
}

std::string self_test(const std::string& isa) {
    const Kernels& tested = choose_kernels(isa);
    const std::vector<const Kernels*> supported = supported_kernels();
    const Kernels& oracle = *supported.front();
    if (&tested == &oracle) return "";
    const std::string difference = find_difference(tested, oracle);
    if (difference.empty()) return "";
    const std::string name = tested.isa, other = name.starts_with("avx512") ? "avx2" : "scalar";
    return "instruction set " + name + " is broken here: " + difference +
           " differs from the scalar path's; set FASTDECODE_ISA=" + other + " and report this machine and build";
}

}  // namespace rworker
