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

/// Sequences of one KV head, each of kContext tokens.
class FilledCache {
  public:
    FilledCache(const Kernels& kernels, DType dtype, int group, std::int64_t num_sequences)
        : kernels_(kernels),
          dtype_(dtype),
          layer_{group, 1, kHeadDim, kHeadDim, 0.09f, 0, 0.0f, {}},
          layout_(layer_, dtype, kBlockSize, 0),
          arena_(layout_.block_bytes * kBlocksEach * num_sequences),
          blocks_(kBlocksEach * num_sequences),
          queries_(group * kHeadDim, 0.01f),
          partials_(group * partial_floats(kHeadDim)),
          scratch_(scratch_floats(kHeadDim, kHeadDim)) {
        std::iota(blocks_.begin(), blocks_.end(), 0);
        const std::vector<float> rows(kContext * kHeadDim, 0.5f);
        for (std::int64_t i = 0; i < num_sequences; ++i)
            kernels.append[int(dtype)]({view(i), DType::float32, rows.data(), rows.data(), kHeadDim, kHeadDim, 0,
                                        kContext, kHeadDim, kHeadDim});
    }

    /// The last token's rows to all of it, split by split.
    void attend_all() {
        for (std::int64_t i = 0; i < std::int64_t(blocks_.size()) / kBlocksEach; ++i)
            for (std::int64_t begin = 0; begin < kContext; begin += kSplitTokens) attend(i, begin);
    }

  private:
    static constexpr std::int64_t kBlocksEach = kContext / kBlockSize;

    HeadView view(std::int64_t sequence) const {
        return {arena_.data(),
                blocks_.data() + sequence * kBlocksEach,
                layout_.block_bytes,
                layout_.values_offset_bytes,
                layout_.key_tile_bytes,
                layout_.value_tile_bytes,
                2};
    }

    void attend(std::int64_t sequence, std::int64_t begin) {
        const TokenRow token{kContext - 1, 0, 0, 0};
        const std::int64_t following = sequence * kContext + begin + kSplitTokens;
        const NextKeys next{view(following % std::int64_t(blocks_.size() * kBlockSize) / kContext),
                            following % kContext, kContext};
        kernels_.attend[int(dtype_)]({.view = view(sequence),
                                      .dtype = DType::float32,
                                      .queries = queries_.data(),
                                      .tokens = &token,
                                      .num_tokens = 1,
                                      .token_stride = 0,
                                      .group = int(layer_.group()),
                                      .split = begin / kSplitTokens,
                                      .end = begin + kSplitTokens,
                                      .window = 0,
                                      .scale = 0.09f,
                                      .soft_cap = 0.0f,
                                      .key_dim = kHeadDim,
                                      .value_dim = kHeadDim,
                                      .partials = partials_.data(),
                                      .partial_stride = 0,
                                      .next = &next,
                                      .scratch = scratch_.data()});
    }

    const Kernels& kernels_;
    DType dtype_;
    LayerSpec layer_;
    LayerLayout layout_;
    Arena arena_;
    std::vector<std::int32_t> blocks_;
    std::vector<float> queries_, partials_, scratch_;
};

/// Cached tokens per second of attending over `num_sequences` sequences of one KV head.
double attend_rate(const Kernels& kernels, DType dtype, int group, std::int64_t num_sequences, int repeats) {
    FilledCache cache(kernels, dtype, group, num_sequences);
    return double(num_sequences * kContext) / best_seconds([&] { cache.attend_all(); }, repeats);
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
