// One thread's attend kernel in GB/s of keys and values and in cached tokens/s, beside a plain read, in thread CPU
// time: what a kernel can do even where neighbours share the cores. Usage: kernel_bench [isa [dtype [group]]]
#include <algorithm>
#include <cstdio>
#include <ctime>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "rworker/arena.hpp"
#include "rworker/kernel_choice.hpp"
#include "rworker/layout.hpp"

using namespace rworker;

namespace {

constexpr std::int64_t kContext = 1024, kHeadDim = 128, kBlockSize = 64;

double cpu_seconds() {
    timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

double best_seconds(const std::function<void()>& call, int repeats) {
    std::vector<double> seconds;
    for (int i = 0; i < repeats; ++i) {
        const double start = cpu_seconds();
        call();
        seconds.push_back(cpu_seconds() - start);
    }
    return *std::min_element(seconds.begin(), seconds.end());
}

/// Cached tokens per second of attending over `num_sequences` sequences of one KV head.
double attend_rate(const Kernels& kernels, DType dtype, int group, std::int64_t num_sequences, int repeats) {
    const LayerSpec layer{group, 1, kHeadDim, kHeadDim, 0.09f, 0, 0.0f, {}};
    const LayerLayout layout(layer, dtype, kBlockSize, 0);
    const std::int64_t blocks_each = kContext / kBlockSize;
    const Arena arena(layout.block_bytes * blocks_each * num_sequences);
    std::vector<std::int32_t> blocks(blocks_each * num_sequences);
    std::iota(blocks.begin(), blocks.end(), 0);
    std::vector<float> queries(group * kHeadDim, 0.01f), rows(kContext * kHeadDim, 0.5f);
    std::vector<float> partials(group * partial_floats(kHeadDim)), scratch(scratch_floats(kHeadDim, kHeadDim));
    const TokenRow token{kContext - 1, 0, 0, 0};
    const auto view = [&](std::int64_t i) {
        return HeadView{arena.data(),
                        blocks.data() + i * blocks_each,
                        layout.block_bytes,
                        layout.values_offset_bytes,
                        layout.key_tile_bytes,
                        layout.value_tile_bytes,
                        2};
    };
    for (std::int64_t i = 0; i < num_sequences; ++i)
        kernels.append[int(dtype)](
            {view(i), DType::float32, rows.data(), rows.data(), kHeadDim, kHeadDim, 0, kContext, kHeadDim, kHeadDim});
    const auto attend = [&](std::int64_t i, std::int64_t begin) {
        const std::int64_t following = i * kContext + begin + kSplitTokens;
        const NextKeys next{view(following / kContext % num_sequences), following % kContext, kContext};
        kernels.attend[int(dtype)]({.view = view(i),
                                    .dtype = DType::float32,
                                    .queries = queries.data(),
                                    .tokens = &token,
                                    .num_tokens = 1,
                                    .token_stride = 0,
                                    .group = group,
                                    .split = begin / kSplitTokens,
                                    .end = begin + kSplitTokens,
                                    .window = 0,
                                    .scale = 0.09f,
                                    .soft_cap = 0.0f,
                                    .key_dim = kHeadDim,
                                    .value_dim = kHeadDim,
                                    .partials = partials.data(),
                                    .partial_stride = 0,
                                    .next = &next,
                                    .scratch = scratch.data()});
    };
    const double seconds = best_seconds(
        [&] {
            for (std::int64_t i = 0; i < num_sequences; ++i)
                for (std::int64_t begin = 0; begin < kContext; begin += kSplitTokens) attend(i, begin);
        },
        repeats);
    return double(num_sequences * kContext) / seconds;
}

double read_rate(const Kernels& kernels, std::int64_t bytes, int repeats) {
    const Arena arena(bytes);
    float* data = reinterpret_cast<float*>(arena.data());
    std::fill(data, data + bytes / 4, 1.0f);
    volatile float sum = 0.0f;
    return double(bytes) / best_seconds([&] { sum = sum + kernels.read(data, bytes / 4, false); }, repeats) / 1e9;
}

}  // namespace

int main(int argc, char** argv) {
    const Kernels& kernels = choose_kernels(argc > 1 ? argv[1] : "auto");
    const char* names[] = {"float32", "float16", "bfloat16", "int8", "int4"};
    std::printf("%s, GB/s by CPU time: read %.1f from memory, %.1f from cache\n", kernels.isa,
                read_rate(kernels, 256 << 20, 9), read_rate(kernels, 256 << 10, 999));
    for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16, DType::int8, DType::int4})
        for (const int group : {1, 2, 3, 4, 7, 8, 32, 64}) {
            if (argc > 2 && names[int(dtype)] != std::string(argv[2])) continue;
            if (argc > 3 && group != std::stoi(argv[3])) continue;
            const std::int64_t bytes = token_bytes({group, 1, kHeadDim, kHeadDim, 0.09f, 0, 0.0f, {}}, dtype);
            const double memory =
                attend_rate(kernels, dtype, group, (256 << 20) / (kContext * bytes), group < 8 ? 9 : 5);
            const double cache = attend_rate(kernels, dtype, group, 1, 199);
            std::printf("%-8s group %2d   memory %5.1f GB/s %6.1f Mtokens/s   cache %5.1f GB/s %6.1f Mtokens/s\n",
                        names[int(dtype)], group, memory * double(bytes) / 1e9, memory / 1e6,
                        cache * double(bytes) / 1e9, cache / 1e6);
        }
}
