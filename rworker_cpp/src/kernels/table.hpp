// A table of all functions of one instruction set.
#pragma once

#include "kernels/append.hpp"
#include "kernels/attend.hpp"
#include "kernels/head_product.hpp"
#include "kernels/latents.hpp"
#include "kernels/score.hpp"
#include "kernels/seen.hpp"

namespace {

/// Reads four streams at once, since one alone does not keep enough lines on their way. Prefetching helps some
/// processors and slows others.
template <class L>
float read_all(const float* data, int64_t count, bool ask) {
    constexpr int streams = 4, line = kCacheLineBytes / 4, vectors = line / L::width;
    const int64_t part = count / streams;
    typename L::vec sum[streams][vectors];
    for (auto& stream : sum)
        for (auto& s : stream) s = L::set1(0.0f);
    for (int64_t i = 0; i < part; i += line) {
        RWORKER_UNROLL
        for (int j = 0; j < streams; ++j) {
            const float* stream = data + j * part + i;
            if (ask) __builtin_prefetch(stream + 64 * line);
            RWORKER_UNROLL
            for (int v = 0; v < vectors; ++v) {
                sum[j][v] = L::add(sum[j][v], L::load(stream + v * L::width));
            }
        }
    }
    float total = 0.0f;
    for (const auto& stream : sum)
        for (const auto& s : stream) total += L::reduce_add(s);
    return total;
}

/// Reads kStreams pages in parallel, line by line, without prefetch.
template <class L>
float read_side_by_side(const uint8_t* const* pages, int64_t count, int64_t page_bytes) {
    constexpr int vectors = kCacheLineBytes / 4 / L::width;
    typename L::vec sum[kStreams];
    for (auto& s : sum) s = L::set1(0.0f);
    for (int64_t first = 0; first + kStreams <= count; first += kStreams)
        for (int64_t i = 0; i < page_bytes; i += kCacheLineBytes) {
            RWORKER_UNROLL
            for (int j = 0; j < kStreams; ++j) {
                const float* line = reinterpret_cast<const float*>(pages[first + j] + i);
                RWORKER_UNROLL
                for (int v = 0; v < vectors; ++v) {
                    sum[j] = L::add(sum[j], L::load(line + v * L::width));
                }
            }
        }
    float total = 0.0f;
    for (const auto& s : sum) total += L::reduce_add(s);
    return total;
}

/// Reads scattered pieces as kernels do: kStreams pages in one ascending run while the next ones are prefetched, page
/// after page or a line of each in turn. Without `read_ahead`: in parallel.
template <class L>
float read_pages(const uint8_t* const* pages, int64_t count, int64_t page_bytes, const ReadAhead* read_ahead) {
    if (!read_ahead) return read_side_by_side<L>(pages, count, page_bytes);
    constexpr int vectors = kCacheLineBytes / 4 / L::width;
    typename L::vec sum[vectors];
    for (auto& s : sum) s = L::set1(0.0f);
    for (int64_t first = 0; first + kStreams <= count; first += kStreams) {
        const uint8_t* const* next = pages + (first + 2 * kStreams <= count ? first + kStreams : first);
        int64_t asked = 0;
        for (int64_t page = 0; page < kStreams; ++page)
            for (int64_t i = 0; i < page_bytes; i += kCacheLineBytes, ++asked) {
                if (*read_ahead == ReadAhead::pages)
                    __builtin_prefetch(next[asked % kStreams] + asked / kStreams * kCacheLineBytes);
                else if (*read_ahead == ReadAhead::run)
                    __builtin_prefetch(next[page] + i);
                else
                    __builtin_prefetch(next[page] + i, 0, 2);
                const float* line = reinterpret_cast<const float*>(pages[first + page] + i);
                RWORKER_UNROLL
                for (int v = 0; v < vectors; ++v) {
                    sum[v] = L::add(sum[v], L::load(line + v * L::width));
                }
            }
    }
    float total = 0.0f;
    for (const auto& s : sum) total += L::reduce_add(s);
    return total;
}

template <class L>
constexpr rworker::Kernels make_kernels(const char* isa) {
    return {isa,
            {append<L, DType::float32>, append<L, DType::float16>, append<L, DType::bfloat16>,
             append_codes<L, DType::int8>, append_codes<L, DType::int4>, append_latents<L, DType::int8>,
             append_latents<L, DType::int4>},
            {attend<L, DType::float32>, attend<L, DType::float16>, attend<L, DType::bfloat16>, attend<L, DType::int8>,
             attend<L, DType::int4>},
            {score<L, DType::float32>, score<L, DType::float16>, score<L, DType::bfloat16>},
            merge<L>,
            combine<L>,
            read_all<L>,
            read_pages<L>,
            {read_latents<L, DType::int8>, read_latents<L, DType::int4>},
            multiply_by_head<L>,
            {see<L, DType::float32>, see<L, DType::float16>, see<L, DType::bfloat16>, see<L, DType::int8>,
             see<L, DType::int4>},
            largest<L>,
            exponentiate<L>};
}

}  // namespace
