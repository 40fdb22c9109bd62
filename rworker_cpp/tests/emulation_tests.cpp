// The emulation of AVX-512 against the processor's own, where it has one, bit for bit.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <random>

#include "check.hpp"
#include "intrinsics.hpp"

namespace {

constexpr int kRounds = 20000;

using Operands = unsigned char[3][64];
using Register = unsigned char[64];

/// Numbers at which rounding, overflow, subnormal or NaN rules begin or end.
constexpr float kEdges[] = {0.0f, 1.0f, 0.5f, 1.5f, 2.5f, 65504.0f, 65519.996f, 65520.0f, 0x1p31f, 0x1.fffffep30f,
                            0x1p-126f, 0x1p-127f, 0x1p-149f, 0x1p-24f, 0x1p-25f, 0x1.8p-25f, 0x1.ffcp-15f, 0x1p-64f,
                            std::numeric_limits<float>::max(), std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::signaling_NaN()};

/// Sixteen lanes, each any bits, an edge, 16-bit edges side by side, or an ordinary number.
void fill(std::mt19937& random, Register& lanes) {
    std::normal_distribution<float> normal;
    for (int i = 0; i < 64; i += 4) {
        std::uint32_t bits = random();
        const float edge = kEdges[random() % std::size(kEdges)];
        const float chosen[] = {std::copysign(edge, random() % 2 ? 1.0f : -1.0f), normal(random)};
        const int kind = random() % 4;
        if (kind < 2) std::memcpy(&bits, &chosen[kind], 4);
        if (kind == 2) {
            constexpr std::uint16_t halves[] = {0x8000, 0x7fff, 0x8080, 0x7f7f, 0xffff, 0x0001, 0x7c00, 0x7c01, 0x03ff};
            bits = halves[random() % std::size(halves)] | std::uint32_t(halves[random() % std::size(halves)]) << 16;
        }
        std::memcpy(lanes + i, &bits, 4);
    }
}

bool alike(const Register& a, const Register& b, bool any_nan) {
    for (int i = 0; i < 64; i += 4) {
        float x, y;
        std::memcpy(&x, a + i, 4), std::memcpy(&y, b + i, 4);
        if (std::memcmp(&x, &y, 4) != 0 && !(any_nan && std::isnan(x) && std::isnan(y))) return false;
    }
    return true;
}

bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
}

}  // namespace

void run_emulation_tests() {
    if (!has_avx512()) {
        std::puts("emulation tests skipped: this CPU lacks AVX-512, VNNI or BF16");
        return;
    }
    std::mt19937 random(3);
    for (int round = 0; round < kRounds; ++round) {
        Operands operands;
        for (Register& operand : operands) fill(random, operand);
        for (int i = 0; i < kNumIntrinsics; ++i) {
            Register real{}, emulated{};
            kRealIntrinsics[i].run(operands, real);
            kEmulatedIntrinsics[i].run(operands, emulated);
            if (!alike(real, emulated, kRealIntrinsics[i].any_nan)) std::fprintf(stderr, "%s: ", kRealIntrinsics[i].name);
            CHECK(alike(real, emulated, kRealIntrinsics[i].any_nan));
        }
    }
}
