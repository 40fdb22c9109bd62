// The self-test finds nothing where all is well, and every fault that is put into a path.
#include <algorithm>
#include <cstdio>
#include <utility>
#include <vector>

#include "check.hpp"
#include "rworker/kernel_choice.hpp"
#include "rworker/self_test.hpp"
#include "rworker/types.hpp"

using namespace rworker;

namespace {

const Kernels& best() {
    static const Kernels& kernels = *supported_kernels().back();
    return kernels;
}

/// One lane of one vector of the last token's values is quantised, or rounded, as another number.
template <int D>
void append_one_lane_wrong(const AppendArgs& args) {
    const std::int64_t last = args.end - args.begin - 1, rows = last * args.value_stride + args.value_dim;
    const float* const values = static_cast<const float*>(args.values);
    std::vector<float> wrong(values, values + rows);
    wrong[last * args.value_stride + args.value_dim / 2] *= 0.8f;
    AppendArgs changed = args;
    changed.values = wrong.data();
    best().append[D](changed);
}

/// The first token's key goes to where the last but one is.
template <int D>
void append_one_key_twice(const AppendArgs& args) {
    best().append[D](args);
    if (args.end - args.begin < 2) return;
    AppendArgs changed = args;
    changed.begin = args.end - 2, changed.end = args.end - 1;
    best().append[D](changed);
}

/// One lane of the last row's output is a little off.
template <int D>
void attend_one_lane_wrong(const AttendArgs& args) {
    best().attend[D](args);
    const TokenRow& last = args.tokens[args.num_tokens - 1];
    float* const partial = args.partials + (last.partials + args.split) * args.partial_stride +
                           (args.group - 1) * partial_floats(args.value_dim);
    partial[16 + args.value_dim - 1] += 0.1f * partial[1];  // in units of the sum of weights
}

/// The last token of a split is not seen.
template <int D>
void attend_one_token_less(const AttendArgs& args) {
    std::vector<TokenRow> tokens(args.tokens, args.tokens + args.num_tokens);
    for (TokenRow& token : tokens) token.position -= token.position > 0;
    AttendArgs changed = args;
    changed.tokens = tokens.data();
    best().attend[D](changed);
}

/// Each row's slope is that of the head before it.
template <int D>
void attend_wrong_slope(const AttendArgs& args) {
    if (!args.alibi_slopes) return best().attend[D](args);
    std::vector<float> slopes(args.alibi_slopes, args.alibi_slopes + args.group);
    std::rotate(slopes.begin(), slopes.end() - 1, slopes.end());
    AttendArgs changed = args;
    changed.alibi_slopes = slopes.data();
    best().attend[D](changed);
}

void merge_without_the_last_split(const MergeArgs& args) {
    for (std::int64_t token = 0; token < args.num_tokens; ++token) {
        MergeArgs changed = args;
        changed.num_tokens = 1;
        changed.num_splits -= args.num_splits > 1;
        changed.partials += token * args.num_splits * args.partial_stride;
        changed.out = static_cast<float*>(args.out) + token * args.token_stride;
        best().merge(changed);
    }
}

void merge_without_sinks(const MergeArgs& args) {
    MergeArgs changed = args;
    changed.sinks = nullptr;
    best().merge(changed);
}

void merge_to_nan(const MergeArgs& args) {
    best().merge(args);
    static_cast<float*>(args.out)[args.value_dim - 1] = __builtin_nanf("");
}

template <int Which>
void read_one_latent_less(const LatentArgs& args) {
    LatentArgs changed = args;
    --changed.end;
    best().read_latents[Which](changed);
}

bool finds(const Kernels& broken, const std::string& what, const std::string& dtype) {
    const std::string found = find_difference(broken, *supported_kernels().front());
    return found.find(what) != std::string::npos && found.find(dtype) != std::string::npos;
}

/// Faults in the functions of one cache dtype.
template <int D>
void test_faults_of(const char* dtype) {
    Kernels broken = best();
    for (const auto wrong : {append_one_lane_wrong<D>, append_one_key_twice<D>}) {
        broken.append[D] = wrong;
        CHECK(finds(broken, "append", dtype));
    }
    broken = best();
    for (const auto wrong : {attend_one_lane_wrong<D>, attend_one_token_less<D>, attend_wrong_slope<D>}) {
        broken.attend[D] = wrong;
        CHECK(finds(broken, "attention", dtype));
    }
}

void test_faults_of_latents() {
    Kernels broken = best();
    broken.read_latents[0] = read_one_latent_less<0>;
    CHECK(finds(broken, "latent rows", "int8"));
    broken = best();
    broken.append[6] = append_one_key_twice<6>;
    CHECK(finds(broken, "latent rows", "int4"));
}

}  // namespace

/// Each instruction set that runs here against the scalar one.
void run_kernel_tests() {
    for (const Kernels* kernels : supported_kernels()) {
        std::printf("  %s\n", kernels->isa);
        CHECK(self_test(kernels->isa).empty());
    }
}

void run_self_test_tests() {
    CHECK_THROWS(self_test("quantum"), Error);
    test_faults_of<0>("float32");
    test_faults_of<1>("float16");
    test_faults_of<2>("bfloat16");
    test_faults_of<3>("int8");
    test_faults_of<4>("int4");
    test_faults_of_latents();
    for (const auto wrong : {merge_without_the_last_split, merge_without_sinks, merge_to_nan}) {
        Kernels broken = best();
        broken.merge = wrong;
        CHECK(finds(broken, "attention", "float32"));
    }
}
