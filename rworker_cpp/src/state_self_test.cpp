#include "rworker/state_self_test.hpp"

#include <cmath>
#include <random>
#include <vector>

namespace rworker {
namespace {

constexpr int kKeyDim = 24, kValueDim = 136, kRowFloats = 144, kTaps = 4, kRows = 8, kLoneRows = 3;
constexpr int kChannels = 2 * kKeyDim + kValueDim, kRowElements = kChannels + kValueDim;

/// The last rows one by one. The matrix is updated at once by the first row, and by the second together with the third.
void advance_lone(const StateKernels& kernels, StateArgs args, std::vector<float>& out) {
    const auto* const rows = static_cast<const float*>(args.rows);
    const Stretch piece{reinterpret_cast<const std::uint8_t*>(args.matrix[0]), 4 * kKeyDim * kRowFloats};
    std::vector<float> values(kRowFloats), key(kRowFloats), taken(kRowFloats);
    args.values = values.data();
    args.pieces = &piece;
    for (int row = kRows - kLoneRows; row < kRows; ++row) {
        const bool last = row + 1 == kRows, second = row + 2 == kRows;
        args.num_earlier = last ? 1 : 0;
        args.num_rows = 1 + args.num_earlier;
        args.position = row - args.num_earlier;
        args.earlier = rows + args.position * kRowElements;
        args.rows = rows + row * kRowElements;
        args.earlier_key = last ? key.data() : nullptr, args.earlier_taken = last ? taken.data() : nullptr;
        args.coming_key = second ? key.data() : nullptr, args.coming_taken = second || last ? taken.data() : nullptr;
        args.out = out.data() + row * kValueDim;
        std::vector<float> before = taken;
        if (last) args.earlier_taken = before.data();
        kernels.advance_lone(args);
        for (const StateChannels& part : {args.query, args.key, args.value})
            if (!second) kernels.keep({DType::float32, args.earlier, kRowElements, 1, args.position, part, kTaps, kRowFloats});
    }
}

/// One head over a few rows: its output, and for float32 its matrix and the window of its values.
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
    args.num_rows = args.num_taken = num_decays ? kRows - kLoneRows : kRows;
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
    for (const StateChannels& part : {args.query, args.key, args.value})
        if (part.dim) kernels.keep({DType::float32, rows.data(), kRowElements, args.num_rows, 0, part, kTaps, kRowFloats});
    if (num_decays) advance_lone(kernels, args, out);
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
            const float near = dtype == DType::float32 ? 1e-4f : 2e-2f;  // of 16 bits, where rounding may differ
            for (std::size_t i = 0; i < want.size(); ++i)
                if (!(std::fabs(got[i] - want[i]) <= near * (1.0f + std::fabs(want[i]))))
                    return std::string("the state of ") + names[kind];
        }
    return "";
}

}  // namespace rworker
