// The emulated tile registers against naive sums in double and in 64-bit integers, and what they refuse.
#include "emulation/tiles.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <thread>
#include <vector>

#include "check.hpp"
#include "rworker/worker.hpp"

namespace {

struct Shape {
    int rows, lanes, columns;  // of the sums, of a row of the left side, of the sums
};

void configure(const Shape& shape) {
    tile_emulation::Config config{};
    config.palette = 1;
    for (const int tile : {0, 1, 2})
        config.rows[tile] = std::uint8_t(tile == 2 ? shape.lanes : shape.rows),
        config.column_bytes[tile] = std::uint16_t(4 * (tile == 1 ? shape.lanes : shape.columns));
    _tile_loadconfig(&config);
}

float widened(std::uint16_t bits) {
    const std::uint32_t word = std::uint32_t(bits) << 16;
    float x;
    std::memcpy(&x, &word, sizeof(x));
    return x;
}

std::uint16_t random_bfloat(std::mt19937& random) {
    const float x = std::normal_distribution<float>()(random);
    std::uint32_t word;
    std::memcpy(&word, &x, sizeof(word));
    return std::uint16_t(word >> 16);
}

void test_bfloat_products(const Shape& shape) {
    std::mt19937 random(1);
    const int stride = shape.lanes + 3, sum_stride = shape.columns + 5;
    std::vector<std::uint16_t> a(2 * shape.rows * stride), b(2 * shape.lanes * sum_stride);
    std::vector<float> sums(shape.rows * sum_stride);
    for (auto* bits : {&a, &b})
        for (std::uint16_t& x : *bits) x = random_bfloat(random);
    for (float& x : sums) x = std::normal_distribution<float>()(random);
    const std::vector<float> before = sums;
    configure(shape);
    _tile_loadd(0, sums.data(), sum_stride * 4);
    _tile_loadd(1, a.data(), stride * 4);
    _tile_loadd(2, b.data(), sum_stride * 4);
    _tile_dpbf16ps(0, 1, 2);
    _tile_stored(0, sums.data(), sum_stride * 4);
    for (int m = 0; m < shape.rows; ++m)
        for (int n = 0; n < sum_stride; ++n) {
            double want = before[m * sum_stride + n], size = std::fabs(want);
            for (int k = 0; n < shape.columns && k < 2 * shape.lanes; ++k) {
                const double product = double(widened(a[m * stride * 2 + k])) *
                                       double(widened(b[k / 2 * sum_stride * 2 + 2 * n + k % 2]));
                want += product, size += std::fabs(product);
            }
            CHECK(std::fabs(sums[m * sum_stride + n] - want) <= 2e-6 * size);
            if (n >= shape.columns) CHECK(sums[m * sum_stride + n] == before[m * sum_stride + n]);
        }
}

template <class Left, class Right, class Product>
void test_byte_products(const Shape& shape, Product product) {
    std::mt19937 random(2);
    std::vector<std::uint8_t> a(4 * shape.rows * shape.lanes), b(4 * shape.lanes * shape.columns);
    std::vector<std::int32_t> sums(shape.rows * shape.columns, 1'000'000);
    for (auto* bytes : {&a, &b})
        for (std::uint8_t& x : *bytes) x = std::uint8_t(random());
    configure(shape);
    _tile_loadd(0, sums.data(), shape.columns * 4);
    _tile_loadd(1, a.data(), shape.lanes * 4);
    _tile_loadd(2, b.data(), shape.columns * 4);
    product(0, 1, 2);
    _tile_stored(0, sums.data(), shape.columns * 4);
    for (int m = 0; m < shape.rows; ++m)
        for (int n = 0; n < shape.columns; ++n) {
            std::int64_t want = 1'000'000;
            for (int k = 0; k < 4 * shape.lanes; ++k)
                want += std::int64_t(Left(a[m * shape.lanes * 4 + k])) *
                        std::int64_t(Right(b[k / 4 * shape.columns * 4 + 4 * n + k % 4]));
            CHECK(sums[m * shape.columns + n] == want);
        }
}

/// One product of one lane: (pair) x (pair) + sum.
float dot(float a0, float a1, float b0, float b1, float sum) {
    const auto pair = [](float low, float high) {
        std::uint32_t words[2];
        std::memcpy(&words[0], &low, 4), std::memcpy(&words[1], &high, 4);
        return words[0] >> 16 | (words[1] & 0xffff0000);
    };
    const std::uint32_t a = pair(a0, a1), b = pair(b0, b1);
    configure({1, 1, 1});
    _tile_loadd(0, &sum, 4), _tile_loadd(1, &a, 4), _tile_loadd(2, &b, 4);
    _tile_dpbf16ps(0, 1, 2);
    _tile_stored(0, &sum, 4);
    return sum;
}

void test_rounding() {
    // Both products are added before the sum takes them: 1 + 2^-24 alone would be lost twice.
    CHECK(dot(0x1p-12f, 0x1p-12f, 0x1p-12f, 0x1p-12f, 1.0f) == 1.0f + 0x1p-23f);
    CHECK(dot(0x1p-12f, 0.0f, 0x1p-12f, 0.0f, 1.0f) == 1.0f);  // halfway: to even
    CHECK(dot(0x1p-127f, 0.0f, 0x1p100f, 0.0f, 0.0f) == 0.0f);  // a denormal operand is a zero
    CHECK(dot(0x1p-70f, 0.0f, 0x1p-60f, 0.0f, 0.0f) == 0.0f);   // so is a denormal result
    CHECK(dot(0.0f, 0.0f, 0.0f, 0.0f, 0x1p-140f) == 0.0f);
    CHECK(std::isnan(dot(0.0f, 1.0f, std::numeric_limits<float>::quiet_NaN(), 1.0f, 0.0f)));
    CHECK(dot(1.0f, 1.0f, std::numeric_limits<float>::infinity(), 1.0f, 0.0f) == INFINITY);
}

/// Whether `misuse` aborts; in a process of its own.
template <class Misuse>
bool aborts(Misuse misuse) {
    const pid_t child = fork();
    if (child == 0) {
        if (!std::freopen("/dev/null", "w", stderr)) _exit(1);
        misuse();
        _exit(0);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
}

void test_misuse() {
    _tile_release();
    CHECK(aborts([] { _tile_zero(0); }));
    CHECK(aborts([] { configure({17, 1, 1}); }));
    CHECK(aborts([] { configure({1, 1, 17}); }));
    CHECK(aborts([] { configure({0, 1, 1}); }));
    CHECK(aborts([] { configure({2, 3, 4}), _tile_zero(3); }));
    CHECK(aborts([] { configure({2, 3, 4}), _tile_dpbf16ps(0, 2, 1); }));
    CHECK(aborts([] { configure({4, 4, 4}), _tile_dpbf16ps(0, 0, 1); }));
    CHECK(aborts([] { configure({2, 3, 4}), _tile_release(), _tile_zero(0); }));
    CHECK(!aborts([] { configure({2, 3, 4}), _tile_dpbf16ps(0, 1, 2); }));
}

void test_tiles_are_a_threads_own() {
    configure({2, 3, 4});
    bool configured = true;
    std::thread([&] { configured = tile_emulation::state().configured; }).join();
    CHECK(!configured && tile_emulation::state().configured);
}

/// A thread that has run its part of a job keeps no tile registers, be it the caller's.
void test_kernels_release_their_tiles() {
    using namespace rworker;
    for (const DType dtype : {DType::bfloat16, DType::int8, DType::int4}) {
        const LayerSpec layer{{4, 2, 16, 16, 0.25f, 0, 0.0f, {}}};
        Worker worker({{layer}, DType::float32, dtype, 16, 4, 1, {}, "avx512_amx"});
        const std::vector<float> rows(4 * 16, 0.5f);
        std::vector<float> out(4 * 16);
        worker.begin_step({}, std::vector<std::vector<Span>>{{{1, 0, 1, SpanMode::attend}}});
        worker.run(0, 0, {rows.data(), rows.data(), rows.data(), out.data()});
        worker.end_step();
        CHECK(!tile_emulation::state().configured);
        for (const float x : out) CHECK(std::fabs(x - 0.5f) < 1e-2f);
    }
}

}  // namespace

void run_tile_tests() {
    test_misuse();  // first, since it forks
    for (const Shape& shape : {Shape{16, 16, 16}, Shape{1, 16, 16}, Shape{5, 3, 7}, Shape{16, 1, 1}}) {
        test_bfloat_products(shape);
        test_byte_products<std::int8_t, std::uint8_t>(shape, [](int c, int a, int b) { _tile_dpbsud(c, a, b); });
        test_byte_products<std::uint8_t, std::uint8_t>(shape, [](int c, int a, int b) { _tile_dpbuud(c, a, b); });
        test_byte_products<std::uint8_t, std::int8_t>(shape, [](int c, int a, int b) { _tile_dpbusd(c, a, b); });
        test_byte_products<std::int8_t, std::int8_t>(shape, [](int c, int a, int b) { _tile_dpbssd(c, a, b); });
    }
    test_rounding();
    test_tiles_are_a_threads_own();
    _tile_release();
    test_kernels_release_their_tiles();
}
