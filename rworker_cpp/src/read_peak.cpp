#include "rworker/read_peak.hpp"

#include <algorithm>
#include <barrier>
#include <thread>
#include <vector>

#include "rworker/arena.hpp"
#include "rworker/kernel_choice.hpp"
#include "rworker/thread_pool.hpp"
#include "rworker/types.hpp"

namespace rworker {
namespace {

constexpr std::int64_t kReadGranule = 256;  // floats; see Kernels::read

}  // namespace

double read_peak(int num_threads, std::int64_t num_bytes, int repeats) {
    if (num_threads < 1 || repeats < 1) throw Error("num_threads and repeats must be at least 1");
    if (num_bytes / num_threads < 1 << 20) throw Error("num_bytes must be at least 1 MB per thread");
    const Kernels& kernels = *supported_kernels().back();
    const Arena arena(num_bytes);
    const std::int64_t count = num_bytes / 4 / num_threads / kReadGranule * kReadGranule;
    std::vector<double> starts(repeats), ends(repeats);
    std::vector<float> sums(num_threads);
    std::barrier meet(num_threads);
    const auto read = [&](int thread) {
        float* part = reinterpret_cast<float*>(arena.data()) + thread * count;
        std::fill(part, part + count, 1.0f);
        for (int i = 0; i < repeats; ++i) {
            meet.arrive_and_wait();
            if (thread == 0) starts[i] = now_seconds();
            sums[thread] += kernels.read(part, count);
            meet.arrive_and_wait();
            if (thread == 0) ends[i] = now_seconds();
        }
    };
    std::vector<std::jthread> helpers;
    for (int i = 1; i < num_threads; ++i) helpers.emplace_back(read, i);
    read(0);
    std::vector<double> rates;
    for (int i = 0; i < repeats; ++i) rates.push_back(double(count) * 4 * num_threads / (ends[i] - starts[i]) / 1e9);
    std::nth_element(rates.begin(), rates.begin() + repeats / 2, rates.end());
    return rates[repeats / 2];
}

}  // namespace rworker
