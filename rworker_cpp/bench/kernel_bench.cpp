// One thread's attend kernel in GB/s of keys and values and in cached tokens/s, beside a plain read of the same pieces
// in the same order, in thread CPU time: what a kernel can do even where neighbours share the cores.
// Usage: kernel_bench [isa [dtype [group [head_dim [read_ahead [alibi|plain [q_len]]]]]]]
#include <algorithm>
#include <cstdio>
#include <ctime>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "rworker/arena.hpp"
#include "rworker/kernel_choice.hpp"
#include "rworker/layout.hpp"

using namespace rworker;

namespace {

constexpr std::int64_t kContext = 1024, kBlockSize = 64, kPageBytes = 4096;

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

/// Some kernels multiply bytes where no channel stands out.
std::vector<float> random_rows(std::int64_t count, float deviation) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal(0.0f, deviation);
    std::vector<float> rows(count);
    for (float& x : rows) x = normal(random);
    return rows;
}

/// Sequences of one KV head, each of kContext tokens, in blocks in random order.
class FilledCache {
  public:
    FilledCache(const Kernels& kernels, DType dtype, int group, int head_dim, ReadAhead read_ahead, bool alibi,
                int q_len, std::int64_t num_sequences)
        : kernels_(kernels),
          read_ahead_(read_ahead),
          dtype_(dtype),
          layer_{group, 1, head_dim, head_dim, 0.09f, 0, 0.0f, {}},
          layout_(layer_, dtype, kBlockSize, 0),
          arena_(layout_.block_bytes * kBlocksEach * num_sequences),
          blocks_(kBlocksEach * num_sequences),
          queries_(random_rows(q_len * group * head_dim, 0.1f)),
          slopes_(alibi ? group : 0, 0.01f),
          partials_((q_len + 1) * group * partial_floats(head_dim)),
          scratch_(scratch_floats(head_dim, head_dim)) {
        for (int i = 0; i < q_len; ++i) tokens_.push_back({kContext - q_len + i, i, 0, i, 0});
        std::iota(blocks_.begin(), blocks_.end(), 0);
        std::shuffle(blocks_.begin(), blocks_.end(), std::mt19937(1));
        const std::vector<float> rows = random_rows(kContext * head_dim, 1.0f);
        for (std::int64_t i = 0; i < num_sequences; ++i)
            kernels.append[int(dtype)]({view(i), DType::float32, rows.data(), rows.data(), head_dim, head_dim, 0,
                                        kContext, head_dim, head_dim});
    }

    /// Reads what attend_all reads, in its order, asking for lines as it does.
    void read_all() {
        if (pages_.empty()) {
            const std::int64_t per_block = (layout_.block_bytes + kPageBytes - 1) / kPageBytes;
            page_bytes_ = layout_.block_bytes / per_block / 64 * 64;
            for (const std::int32_t block : blocks_)
                for (std::int64_t page = 0; page < per_block; ++page)
                    pages_.push_back(arena_.data() + block * layout_.block_bytes + page * page_bytes_);
        }
        sum_ = sum_ + kernels_.read_pages(pages_.data(), std::int64_t(pages_.size()), page_bytes_, &read_ahead_);
    }
    std::int64_t read_bytes() const { return std::int64_t(pages_.size()) * page_bytes_; }

    /// The last tokens' rows to all of it, split by split.
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
        const std::int64_t following = sequence * kContext + begin + kSplitTokens;
        const NextTokens next{view(following % std::int64_t(blocks_.size() * kBlockSize) / kContext),
                            following % kContext, kContext};
        kernels_.attend[int(dtype_)]({.view = view(sequence),
                                      .dtype = DType::float32,
                                      .queries = queries_.data(),
                                      .tokens = tokens_.data(),
                                      .num_tokens = std::int64_t(tokens_.size()),
                                      .token_stride = layer_.num_heads * layer_.key_dim,
                                      .group = int(layer_.group()),
                                      .split = begin / kSplitTokens,
                                      .end = begin + kSplitTokens,
                                      .scale = 0.09f,
                                      .soft_cap = 0.0f,
                                      .alibi_slopes = slopes_.empty() ? nullptr : slopes_.data(),
                                      .key_dim = int(layer_.key_dim),
                                      .value_dim = int(layer_.value_dim),
                                      .partials = partials_.data(),
                                      .partial_stride = layer_.num_heads * partial_floats(layer_.value_dim),
                                      .next = &next,
                                      .read_ahead = read_ahead_,
                                      .scratch = scratch_.data()});
    }

    const Kernels& kernels_;
    ReadAhead read_ahead_;
    DType dtype_;
    LayerSpec layer_;
    LayerLayout layout_;
    Arena arena_;
    std::vector<std::int32_t> blocks_;
    std::vector<TokenRow> tokens_;
    std::vector<float> queries_, slopes_, partials_, scratch_;
    std::vector<const std::uint8_t*> pages_;
    std::int64_t page_bytes_ = 0;
    volatile float sum_ = 0.0f;
};

/// Best rates in turns: 1e9 bytes per second of the read, and cached tokens per second of attending.
struct Rates {
    double scattered, attend;
};

Rates rates(const Kernels& kernels, DType dtype, int group, int head_dim, ReadAhead read_ahead, bool alibi, int q_len,
            std::int64_t num_sequences, int repeats) {
    FilledCache cache(kernels, dtype, group, head_dim, read_ahead, alibi, q_len, num_sequences);
    double read = 1e9, attend = 1e9;
    for (int i = 0; i < repeats; ++i) {
        read = std::min(read, best_seconds([&] { cache.read_all(); }, 1));
        attend = std::min(attend, best_seconds([&] { cache.attend_all(); }, 1));
    }
    return {double(cache.read_bytes()) / read / 1e9, double(num_sequences * kContext) / attend};
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
    const int head_dim = argc > 4 ? std::stoi(argv[4]) : 128;
    const ReadAhead read_ahead = parse_read_ahead(argc > 5 ? argv[5] : "run");
    const bool alibi = argc > 6 && std::string(argv[6]) == "alibi";
    const int q_len = argc > 7 ? std::stoi(argv[7]) : 1;
    for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16, DType::int8, DType::int4})
        for (const int group : {1, 2, 3, 4, 7, 8, 16, 32}) {
            if (argc > 2 && names[int(dtype)] != std::string(argv[2])) continue;
            if (argc > 3 && std::string(argv[3]) != "all" && group != std::stoi(argv[3])) continue;
            const std::int64_t bytes = token_bytes({group, 1, head_dim, head_dim, 0.09f, 0, 0.0f, {}}, dtype);
            const Rates memory =
                rates(kernels, dtype, group, head_dim, read_ahead, alibi, q_len, (256 << 20) / (kContext * bytes), 7);
            const double gb_per_s = memory.attend * double(bytes) / 1e9;
            const double cache = rates(kernels, dtype, group, head_dim, read_ahead, alibi, q_len, 1, 199).attend;
            std::printf("%-8s group %2d   memory %5.1f GB/s, %4.2f of %5.1f scattered, %6.1f Mtokens/s   cache %5.1f "
                        "GB/s %6.1f Mtokens/s, %6.1f G multiply-adds/s\n",
                        names[int(dtype)], group, gb_per_s, gb_per_s / memory.scattered, memory.scattered,
                        memory.attend / 1e6, cache * double(bytes) / 1e9, cache / 1e6,
                        cache * double(2 * head_dim * group * q_len) / 1e9);
        }
}
