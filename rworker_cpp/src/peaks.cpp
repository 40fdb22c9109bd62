#include "rworker/peaks.hpp"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <random>

#include "rworker/kernel_choice.hpp"
#include "rworker/types.hpp"

namespace rworker {
namespace {

constexpr std::int64_t kItemFloats = 1 << 20, kItemBytes = kItemFloats * 4;  // read by a thread at a time
constexpr std::int64_t kCacheLine = 64, kPageBytes = 4096, kLeastPieceBytes = 64;
constexpr std::int64_t kItemMultiplyAdds = 32 * kMultiplyAddGranule;  // about 50 us
constexpr std::int64_t kMultiplyAddItemsPerThread = 40;                      // about 2 ms

/// Calls work(item) for `num_items` items, on all threads.
template <class Work>
class SharedJob final : public Job {
  public:
    SharedJob(std::int64_t num_items, Work work) : work_(work) {
        num_items_ = num_items;
        worth_helpers_ = true;
    }
    void run(std::int64_t item, std::int64_t, int) noexcept override { work_(item); }

  private:
    Work work_;
};

template <class Work>
double seconds_of(ThreadPool& pool, std::int64_t num_items, Work work) {
    SharedJob<Work> job(num_items, work);
    pool.submit(job);
    job.wait();
    return job.end_seconds - job.start_seconds;
}

std::int64_t checked_bytes(int num_threads, std::int64_t num_bytes) {
    if (num_threads < 1 || num_threads > 1024)
        throw Error("num_threads is " + std::to_string(num_threads) + "; it must be 1 to 1024");
    if (num_bytes / num_threads < 1 << 20)
        throw Error("num_bytes is " + std::to_string(num_bytes) + "; it must be at least 1 MB per thread");
    return (num_bytes + kItemBytes - 1) / kItemBytes * kItemBytes;
}

/// Instruction sets in this build; each extends the previous one.
std::vector<const MultiplyAdds*> built_multiply_adds() {
    return {
        &kScalarMultiplyAdds,
#ifdef RWORKER_AVX2
        &kAvx2MultiplyAdds,
#endif
#ifdef RWORKER_AVX512
        &kAvx512MultiplyAdds, &kAvx512VnniMultiplyAdds, &kAvx512Bf16MultiplyAdds, &kAvx512AmxMultiplyAdds,
#endif
#ifdef RWORKER_NEON
        &kNeonMultiplyAdds, &kNeonDotMultiplyAdds, &kNeonBf16MultiplyAdds,
#endif
    };
}

/// The loops of an instruction set. If it has none of a kind, those of the set that it extends.
MultiplyAdds choose_multiply_adds(const std::string& isa) {
    const std::string chosen = choose_kernels(isa).isa;
    MultiplyAdds best{};
    for (const MultiplyAdds* next : built_multiply_adds()) {
        best.isa = next->isa;
        for (std::size_t kind = 0; kind < std::size(best.run); ++kind)
            if (next->run[kind]) best.run[kind] = next->run[kind];
        if (chosen == best.isa) break;
    }
    return best;
}

}  // namespace

MultiplyAddKind multiply_add_kind(DType kv_dtype) {
    if (is_quantized(kv_dtype)) return MultiplyAddKind::integer;
    return kv_dtype == DType::bfloat16 ? MultiplyAddKind::bfloat16 : MultiplyAddKind::float32;
}

Peaks::Peaks(int num_threads, std::int64_t num_bytes, std::vector<int> cores, const std::string& isa)
    : num_bytes_(checked_bytes(num_threads, num_bytes)),
      multiply_adds_(choose_multiply_adds(isa)),
      arena_(num_bytes_),
      pool_(num_threads, std::move(cores)) {
    float* data = reinterpret_cast<float*>(arena_.data());
    seconds_of(pool_, num_bytes_ / kItemBytes,
               [data](std::int64_t item) { std::fill_n(data + item * kItemFloats, kItemFloats, 1.0f); });
}

double Peaks::read() { return std::max(read_once(false), read_once(true)); }

double Peaks::read_once(bool ask) {
    const Kernels& kernels = *supported_kernels().back();
    const float* data = reinterpret_cast<const float*>(arena_.data());
    const double seconds = seconds_of(pool_, num_bytes_ / kItemBytes, [&kernels, data, ask](std::int64_t item) {
        volatile float sum = kernels.read(data + item * kItemFloats, kItemFloats, ask);
        static_cast<void>(sum);
    });
    return double(num_bytes_) / seconds / 1e9;
}

void Peaks::scatter(std::int64_t piece_bytes) {
    if (piece_bytes < kLeastPieceBytes || piece_bytes > num_bytes_ / 8)
        throw Error("piece_bytes is " + std::to_string(piece_bytes) + "; it must be " +
                    std::to_string(kLeastPieceBytes) + " to an eighth of num_bytes, " + std::to_string(num_bytes_ / 8));
    const std::int64_t pages_each = (piece_bytes + kPageBytes - 1) / kPageBytes;
    std::vector<std::int64_t> pieces(num_bytes_ / piece_bytes);
    std::iota(pieces.begin(), pieces.end(), 0);
    std::shuffle(pieces.begin(), pieces.end(), std::mt19937(1));
    piece_bytes_ = piece_bytes;
    page_bytes_ = piece_bytes / pages_each / kCacheLine * kCacheLine;
    pages_.clear();
    for (const std::int64_t piece : pieces)
        for (std::int64_t page = 0; page < pages_each; ++page)
            pages_.push_back(arena_.data() + piece * piece_bytes / kCacheLine * kCacheLine + page * page_bytes_);
}

double Peaks::read_scattered(std::int64_t piece_bytes, std::optional<ReadAhead> read_ahead) {
    if (piece_bytes != piece_bytes_) scatter(piece_bytes);
    const Kernels& kernels = *supported_kernels().back();
    const std::int64_t all_pages = std::int64_t(pages_.size()) / kStreams * kStreams;
    const std::int64_t pages_per_item =
        std::min(std::max<std::int64_t>(kItemBytes / page_bytes_ / kStreams, 1) * kStreams, all_pages);
    const std::int64_t items = std::int64_t(pages_.size()) / pages_per_item;
    const ReadAhead* const ask = read_ahead ? &*read_ahead : nullptr;
    const double seconds = seconds_of(pool_, items, [&kernels, pages_per_item, ask, this](std::int64_t item) {
        const std::uint8_t* const* first = pages_.data() + item * pages_per_item;
        volatile float sum = kernels.read_pages(first, pages_per_item, page_bytes_, ask);
        static_cast<void>(sum);
    });
    return double(items * pages_per_item * page_bytes_) / seconds / 1e9;
}

double Peaks::multiply_add(MultiplyAddKind kind) {
    const auto run = multiply_adds_.run[int(kind)];
    const std::int64_t items = pool_.num_threads() * kMultiplyAddItemsPerThread;
    const double seconds = seconds_of(pool_, items, [run](std::int64_t) {
        volatile float sum = run(kItemMultiplyAdds);
        static_cast<void>(sum);
    });
    return double(items * kItemMultiplyAdds) / seconds / 1e9;
}

double read_peak(int num_threads, std::int64_t num_bytes, int repeats) {
    if (repeats < 1) throw Error("repeats is " + std::to_string(repeats) + "; it must be at least 1");
    Peaks peaks(num_threads, num_bytes, {}, "auto");
    std::vector<double> rates(repeats);
    std::generate(rates.begin(), rates.end(), [&] { return peaks.read(); });
    std::nth_element(rates.begin(), rates.begin() + repeats / 2, rates.end());
    return rates[repeats / 2];
}

}  // namespace rworker
