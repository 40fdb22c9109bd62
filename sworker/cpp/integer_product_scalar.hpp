#pragma once

#include "integer_kernels.hpp"

/// Plain loops over 16-bit codes: the reference, and what processors without another kernel run.
namespace sworker::SWORKER_ISA {
namespace {

using Code = std::int16_t;

void multiply_row(const Code* codes, std::size_t stride, const PanelProduct& job, std::int32_t* __restrict__ sums) {
    for (std::size_t column = 0; column < PANEL; ++column) sums[column] = 0;
    for (std::size_t quad = 0; quad < job.quads; ++quad) {
        const std::int8_t* __restrict__ weights = job.panel + quad * PANEL * QUAD;
        const Code* __restrict__ x = codes + quad * stride;
        for (std::size_t column = 0; column < PANEL; ++column)
            for (std::size_t i = 0; i < QUAD; ++i)
                sums[column] += std::int32_t(x[i]) * std::int32_t(weights[column * QUAD + i]);
    }
}

void multiply(const PanelProduct& job) {
    for (std::size_t row = 0; row < job.rows; ++row)
        multiply_row(static_cast<const Code*>(job.codes) + row * QUAD, job.rows * QUAD, job, job.sums + row * PANEL);
}

}  // namespace
}  // namespace sworker::SWORKER_ISA
