#include "rworker/state_self_test.hpp"

#include <cmath>
#include <random>
#include <vector>

namespace rworker {
namespace {

constexpr int kKeyDim = 24, kValueDim = 136, kRowFloats = 144, kTaps = 4, kRows = 5;
constexpr int kChannels = 2 * kKeyDim + kValueDim, kRowElements = kChannels + kKeyDim + 1;

/// One head over a few rows: its output, its matrix and the window of its values.
std::vector<float> computed(const StateKernels& kernels, bool delta) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    std::vector<float> rows(kRows * kRowElements), filters(kTaps * kChannels + 16), bias(kChannels + 16);
    for (std::vector<float>* const floats : {&rows, &filters, &bias})
        for (float& x : *floats) x = normal(random);
    for (int row = 0; row < kRows; ++row)
        for (int i = kChannels; i < kRowElements; ++i)
            rows[row * kRowElements + i] = (i + 1 < kRowElements ? -1.0f : 1.0f) * std::fabs(rows[row * kRowElements + i]);
    std::vector<float> out(kRows * kValueDim), state((kKeyDim + 3 * (kTaps - 1)) * kRowFloats), scratch(
        state_scratch_floats(kKeyDim, kValueDim, kTaps));
    std::vector<float*> pointers;
    for (std::size_t i = 0; i < state.size(); i += kRowFloats) pointers.push_back(state.data() + i);
    StateArgs args{};
    args.dtype = DType::float32;
    args.rows = rows.data();
    args.row_stride = kRowElements;
    args.num_rows = kRows;
    args.query = {0, kKeyDim, pointers.data()};
    args.key = {kKeyDim, kKeyDim, pointers.data() + kTaps - 1};
    args.value = {2 * kKeyDim, kValueDim, pointers.data() + 2 * (kTaps - 1)};
    args.filters = filters.data();
    args.bias = bias.data();
    args.channels = kChannels;
    args.taps = kTaps;
    args.silu = true;
    args.delta = args.norm = delta;
    args.first_decay = 4 * kChannels;
    args.first_rate = 4 * (kChannels + kKeyDim);
    args.decays = kKeyDim;
    args.scale = 0.2f;
    args.skip = delta ? 0.0f : 0.7f;
    args.matrix = pointers.data() + 3 * (kTaps - 1);
    args.row_floats = kRowFloats;
    args.out = out.data();
    args.out_stride = kValueDim;
    args.scratch = scratch.data();
    kernels.advance(args);
    kernels.keep({DType::float32, rows.data(), kRowElements, kRows, 0, args.value, kTaps, kRowFloats});
    out.insert(out.end(), state.begin(), state.end());
    return out;
}

}  // namespace

std::string find_difference(const StateKernels& tested, const StateKernels& oracle) {
    for (const bool delta : {true, false}) {
        const std::vector<float> got = computed(tested, delta), want = computed(oracle, delta);
        for (std::size_t i = 0; i < want.size(); ++i)
            if (!(std::fabs(got[i] - want[i]) <= 1e-4f * (1.0f + std::fabs(want[i]))))
                return std::string("the state of ") + (delta ? "a gated delta rule" : "a scan");
    }
    return "";
}

}  // namespace rworker
