// Plain loops, compiled once per instruction set, named by SWORKER_ISA. They call nothing of std::, since the linker
// may keep such a function's copy with wide instructions for all files.
#include "row_kernels.hpp"

#include "floats.hpp"

#define SWORKER_TEXT(name) #name
#define SWORKER_NAME(name) SWORKER_TEXT(name)

namespace sworker::SWORKER_ISA {
namespace {

constexpr std::size_t LANES = 16;

/// The sum of sixteen lanes, pairwise.
float sum_of(float (&lanes)[LANES]) {
    for (std::size_t width = LANES / 2; width > 0; width /= 2)
        for (std::size_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
    return lanes[0];
}

/// The mean of value(i)², i < dim, in sixteen parallel sums, then pairwise: the order does not depend on the registers.
template <typename Value>
float mean_square(const Value& value, std::size_t dim) {
    float lanes[LANES] = {};
    std::size_t i = 0;
    for (; i + LANES <= dim; i += LANES)
        for (std::size_t lane = 0; lane < LANES; ++lane) lanes[lane] += value(i + lane) * value(i + lane);
    for (; i < dim; ++i) lanes[i % LANES] += value(i) * value(i);
    return sum_of(lanes) / float(dim);
}

template <typename T, typename Value>
void norm_values(const RmsNorm<T>& job, std::size_t row, const Value& value) {
    const float* __restrict__ weight = job.weight;
    T* __restrict__ out = job.out + row * job.dim;
    const float scale = 1.0f / __builtin_sqrtf(mean_square(value, job.dim) + job.eps);
    if (job.round_first)
        for (std::size_t i = 0; i < job.dim; ++i) out[i] = as<T>(round_to<T>(value(i) * scale) * weight[i]);
    else
        for (std::size_t i = 0; i < job.dim; ++i) out[i] = as<T>(value(i) * scale * weight[i]);
}

template <typename T>
void norm(const RmsNorm<T>& job, std::size_t row) {
    const T* __restrict__ x = job.x + row * job.dim;
    if (job.residual == nullptr) return norm_values(job, row, [x](std::size_t i) { return load(x[i]); });
    const T* __restrict__ residual = job.residual + row * job.dim;
    T* __restrict__ total = job.total + row * job.dim;
    for (std::size_t i = 0; i < job.dim; ++i) total[i] = as<T>(load(x[i]) + load(residual[i]));
    norm_values(job, row, [x, residual](std::size_t i) { return load(x[i]) + load(residual[i]); });
}

template <typename T>
void rotate_head(const T* __restrict__ x, const T* __restrict__ cos, const T* __restrict__ sin, T* __restrict__ out,
                 std::size_t half) {
    for (std::size_t i = 0; i < half; ++i) {
        const float first = load(x[i]), second = load(x[half + i]);
        out[i] = as<T>(round_to<T>(first * load(cos[i])) + round_to<T>(-second * load(sin[i])));
        out[half + i] = as<T>(round_to<T>(second * load(cos[half + i])) + round_to<T>(first * load(sin[half + i])));
    }
}

template <typename T>
void rotate(const Rotation<T>& job, std::size_t row) {
    for (std::size_t head = 0; head < job.heads; ++head)
        rotate_head(job.x + row * job.row_stride + head * job.dim, job.cos + row * job.dim, job.sin + row * job.dim,
                    job.out + (row * job.heads + head) * job.dim, job.dim / 2);
}

/// Add `count` elements, at most SOME, of each part of a row, from element `first` on.
constexpr std::size_t SOME = 64;

template <typename T>
void sum_some(const WeightedSum<T>& job, std::size_t row, std::size_t first, std::size_t count) {
    float total[SOME];
    for (std::size_t term = 0; term < job.terms; ++term) {
        const T* __restrict__ part = job.parts + std::size_t(job.places[row * job.terms + term]) * job.dim + first;
        const float weight = load(job.weights[row * job.terms + term]);
        if (term == 0)
            for (std::size_t i = 0; i < count; ++i) total[i] = round_to<T>(load(part[i]) * weight);
        else
            for (std::size_t i = 0; i < count; ++i) total[i] += round_to<T>(load(part[i]) * weight);
    }
    T* __restrict__ out = job.out + row * job.dim + first;
    for (std::size_t i = 0; i < count; ++i) out[i] = as<T>(total[i]);
}

template <typename T>
void sum(const WeightedSum<T>& job, std::size_t row) {
    std::size_t first = 0;
    for (; first + SOME <= job.dim; first += SOME) sum_some(job, row, first, SOME);
    if (first < job.dim) sum_some(job, row, first, job.dim - first);
}

template <typename T>
void add(const RowSum<T>& job, std::size_t row) {
    const T* x = job.x + row * job.dim;
    const T* y = job.y + row * job.dim;
    T* out = job.out + row * job.dim;
    for (std::size_t i = 0; i < job.dim; ++i) out[i] = as<T>(load(x[i]) + load(y[i]));
}

/// Return an integer that sorts like the float `value`, since compilers do not vectorize the maximum of floats.
/// Both zeros become 0. A positive NaN sorts above +inf, and a negative NaN below -inf.
std::int16_t ordered(BFloat16 value) {
    const auto bits = std::int16_t(value);
    const auto magnitude = std::int16_t(bits & 0x7FFF);
    return bits < 0 ? std::int16_t(-magnitude) : magnitude;
}

std::int32_t ordered(float value) {
    std::int32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    const std::int32_t magnitude = bits & 0x7FFFFFFF;
    return bits < 0 ? -magnitude : magnitude;
}

template <typename T>
void choose(const Likeliest<T>& job, std::size_t row) {
    using Key = decltype(ordered(T{}));
    constexpr Key infinite = sizeof(T) == 2 ? Key(0x7F80) : Key(0x7F800000);
    const T* logits = job.logits + row * job.vocab;
    Key most = ordered(logits[0]), least = most;
    for (std::size_t i = 1; i < job.vocab; ++i) {
        const Key key = ordered(logits[i]);
        most = key > most ? key : most;
        least = key < least ? key : least;
    }
    job.tokens[row] = -1;
    if (most >= infinite || most <= -infinite || least < -infinite) return;
    std::size_t token = 0;
    for (Key found = 0; token + SOME <= job.vocab; token += SOME) {
        for (std::size_t i = 0; i < SOME; ++i) found = Key(found | Key(ordered(logits[token + i]) == most));
        if (found) break;
    }
    while (ordered(logits[token]) != most) ++token;
    job.tokens[row] = std::int64_t(token);
}

/// Sums of `COLUMNS` neighbouring columns, each in the order of a single column.
template <std::size_t COLUMNS>
void multiply_columns(const float* __restrict__ x, const float* __restrict__ weight, std::size_t width,
                      float* __restrict__ out) {
    float lanes[COLUMNS][LANES] = {};
    std::size_t i = 0;
    for (; i + LANES <= width; i += LANES)
        for (std::size_t column = 0; column < COLUMNS; ++column)
            for (std::size_t lane = 0; lane < LANES; ++lane)
                lanes[column][lane] += x[i + lane] * weight[column * width + i + lane];
    for (; i < width; ++i)
        for (std::size_t column = 0; column < COLUMNS; ++column)
            lanes[column][i % LANES] += x[i] * weight[column * width + i];
    for (std::size_t column = 0; column < COLUMNS; ++column) out[column] = sum_of(lanes[column]);
}

void multiply_row(const OrderedProduct& job, std::size_t row) {
    const float* x = job.x + row * job.width;
    float* out = job.out + row * job.columns;
    std::size_t column = 0;
    for (; column + 4 <= job.columns; column += 4)
        multiply_columns<4>(x, job.weight + column * job.width, job.width, out + column);
    for (; column < job.columns; ++column)
        multiply_columns<1>(x, job.weight + column * job.width, job.width, out + column);
}

/// Return the nearest integer of a number below 2^51 in size, the even one of two.
double nearest_integer(double x) {
    constexpr double large = 6755399441055744.0;  // 3 · 2^51: a sum with it has no digits after the point
    return (x + large) - large;
}

/// Change one code to the best of those it may become. `nearest`: where it began.
void descend_code(const Descent& job, std::size_t i, double nearest, double* __restrict__ gradient, std::int8_t& code) {
    const double* __restrict__ moments = job.moments + i * job.width;
    const double step = moments[i] * job.unit;
    if (2.0 * gradient[i] <= step && -2.0 * gradient[i] <= step) return;
    double least = nearest - job.farthest, most = nearest + job.farthest;
    least = least < -127.0 ? -127.0 : least;
    most = most > 127.0 ? 127.0 : most;
    double best = double(code) + nearest_integer(gradient[i] / step);
    best = best < least ? least : best > most ? most : best;
    const double move = (best - double(code)) * job.unit;
    code = std::int8_t(best);
    if (move != 0.0)
        for (std::size_t k = 0; k < job.width; ++k) gradient[k] -= move * moments[k];
}

void descend(const Descent& job, std::size_t row, std::int8_t* nearest) {
    std::int8_t* codes = job.codes + row * job.width;
    double* gradient = job.gradient + row * job.width;
    for (std::size_t i = 0; i < job.width; ++i) nearest[i] = codes[i];
    for (std::size_t sweep = 0; sweep < job.sweeps; ++sweep)
        for (std::size_t i = 0; i < job.width; ++i) descend_code(job, i, nearest[i], gradient, codes[i]);
}

}  // namespace

const RowKernels kernels{SWORKER_NAME(SWORKER_ISA),
                         {norm<float>, rotate<float>, sum<float>, add<float>, choose<float>},
                         {norm<BFloat16>, rotate<BFloat16>, sum<BFloat16>, add<BFloat16>, choose<BFloat16>},
                         multiply_row,
                         descend};

}  // namespace sworker::SWORKER_ISA
