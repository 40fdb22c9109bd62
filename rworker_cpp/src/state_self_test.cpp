#include "rworker/state_self_test.hpp"

#include <cmath>
#include <random>
#include <vector>

namespace rworker {
namespace {

constexpr int kKeyDim = 24, kValueDim = 136, kRowFloats = 144, kTaps = 4, kRows = 5;
constexpr int kChannels = 2 * kKeyDim + kValueDim, kRowElements = kChannels + kValueDim;

/// One head over a few rows: its output, and of float32 its matrix and the window of its values.
std::vector<float> computed(const StateKernels& kernels, Recurrence recurrence, DType state_dtype) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    std::vector<float> rows(kRows * kRowElements), filters(kTaps * kChannels + 16), bias(kChannels + 16),
        factors(kKeyDim * kValueDim + 16);
    for (std::vector<float>* const floats : {&rows, &filters, &bias, &factors})
        for (float& x : *floats) x = normal(random);
    const bool delta = recurrence == Recurrence::delta, lru = recurrence == Recurrence::lru;
    const int num_decays = delta || recurrence == Recurrence::scan ? kKeyDim : 0;
    for (int row = 0; row < kRows; ++row)
        for (int i = 0; i < kValueDim; ++i) {
            float& number = rows[row * kRowElements + kChannels + i];
            number = (i < num_decays ? -1.0f : 1.0f) * std::fabs(number);
        }
    for (float& factor : factors) factor = -std::fabs(factor);
    std::vector<float> out(kRows * kValueDim), state((kKeyDim + 3 * (kTaps - 1)) * kRowFloats), scratch(
        state_scratch_floats(kKeyDim, kValueDim, kTaps)), shared(state_shared_floats(kKeyDim, kRows));
    std::vector<float*> pointers;
    for (std::size_t i = 0; i < state.size(); i += kRowFloats) pointers.push_back(state.data() + i);
    StateArgs args{};
    args.dtype = DType::float32;
    args.rows = rows.data();
    args.row_stride = kRowElements;
    args.num_rows = args.num_taken = kRows;
    args.recurrence = recurrence;
    if (!lru) args.query = {0, kKeyDim, pointers.data()};
    if (!lru) args.key = {kKeyDim, kKeyDim, pointers.data() + kTaps - 1};
    args.value = {2 * kKeyDim, kValueDim, pointers.data() + 2 * (kTaps - 1)};
    args.filters = filters.data();
    args.bias = bias.data();
    args.channels = kChannels;
    args.taps = kTaps;
    args.silu = true;
    args.norm = delta;
    args.factors = factors.data();
    args.factor_stride = kValueDim;
    args.first_decay = 4 * kChannels;
    args.first_rate = 4 * (kChannels + kKeyDim);
    args.decays = kKeyDim;
    args.scale = 0.2f;
    args.skip = recurrence == Recurrence::scan ? 0.7f : 0.0f;
    args.matrix = pointers.data() + 3 * (kTaps - 1);
    args.row_floats = kRowFloats;
    args.state_dtype = state_dtype;
    args.out = out.data();
    args.out_stride = kValueDim;
    args.scratch = scratch.data();
    args.shared = shared.data();
    kernels.advance(args);
    kernels.keep({DType::float32, rows.data(), kRowElements, kRows, 0, args.value, kTaps, kRowFloats});
    if (state_dtype == DType::float32) out.insert(out.end(), state.begin(), state.end());
    return out;
}

}  // namespace

std::string find_difference(const StateKernels& tested, const StateKernels& oracle) {
    constexpr Recurrence kinds[] = {Recurrence::delta, Recurrence::scan, Recurrence::selective, Recurrence::lru};
    const char* const names[] = {"the gated delta rule", "Mamba-2's scan", "Mamba-1's scan", "a gated linear recurrence"};
    for (int kind = 0; kind < 4; ++kind)
        for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
            const std::vector<float> got = computed(tested, kinds[kind], dtype), want = computed(oracle, kinds[kind], dtype);
            const float near = dtype == DType::float32 ? 1e-4f : 2e-2f;  // of 16 bits, where another rounding tips the last
            for (std::size_t i = 0; i < want.size(); ++i)
                if (!(std::fabs(got[i] - want[i]) <= near * (1.0f + std::fabs(want[i]))))
                    return std::string("the state of ") + names[kind];
        }
    return "";
}

}  // namespace rworker
