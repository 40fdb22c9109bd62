// Compiled once per instruction set, named by SWORKER_ISA. It calls nothing of std::, since the linker may keep such a
// function's copy with wide instructions for all files.
#include "integer_kernels.hpp"

#include "integer_rows.hpp"

#if defined(__AVX512VNNI__)
#include "integer_product_vnni.hpp"
#elif defined(__AVX2__)
#include "integer_product_avx2.hpp"
#else
#include "integer_product_scalar.hpp"
#endif

#define SWORKER_TEXT(name) #name
#define SWORKER_NAME(name) SWORKER_TEXT(name)

namespace sworker::SWORKER_ISA {
namespace {

template <typename T>
void scale_row(const std::int32_t* __restrict__ sums, const Scaling<T>& job, float row_scale, T* __restrict__ out) {
    const float* __restrict__ scales = job.column_scales;
    const float* __restrict__ bias = job.bias;
    if (bias)
        for (std::size_t i = 0; i < job.columns; ++i)
            out[i] = as<T>(float(sums[i]) * scales[i] * row_scale + bias[i]);
    else
        for (std::size_t i = 0; i < job.columns; ++i) out[i] = as<T>(float(sums[i]) * scales[i] * row_scale);
}

template <typename T>
void scale(const Scaling<T>& job) {
    for (std::size_t row = 0; row < job.rows; ++row)
        scale_row(job.sums + row * job.sums_stride, job, job.row_scales[row], job.out + row * job.out_stride);
}

}  // namespace

const IntegerKernels integer_kernels{SWORKER_NAME(SWORKER_ISA),
                                     sizeof(Code),
                                     {rotate<float>, scale<float>},
                                     {rotate<BFloat16>, scale<BFloat16>},
                                     quantize<Code>,
                                     quantize_plain,
                                     multiply};

}  // namespace sworker::SWORKER_ISA
