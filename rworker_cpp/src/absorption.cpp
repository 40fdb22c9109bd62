#include "rworker/absorption.hpp"

#include <algorithm>
#include <cstring>
#include <string>

namespace rworker {
namespace {

constexpr std::int64_t kItemRows = 48;  // rows that read a head's weights together

std::int64_t num_chunks(const HeadRows& rows) { return (rows.num_rows + kItemRows - 1) / kItemRows; }

const std::uint8_t* at(const void* data, std::int64_t elements, DType dtype) {
    return static_cast<const std::uint8_t*>(data) + elements * item_bytes(dtype);
}

std::uint8_t* at(void* data, std::int64_t elements, DType dtype) {
    return static_cast<std::uint8_t*>(data) + elements * item_bytes(dtype);
}

}  // namespace

HeadWeights::HeadWeights(const LayerSpec& layer, DType dtype)
    : nope_(layer.latent()->nope_dim),
      rank_(layer.value_dim),
      value_(layer.latent()->out_dim),
      item_bytes_(item_bytes(dtype)),
      keys_bytes_(nope_ * round_up16(rank_) * item_bytes_),
      head_bytes_(keys_bytes_ + rank_ * round_up16(value_) * item_bytes_),
      is_set_(layer.num_heads),
      bytes_(layer.num_heads * head_bytes_) {}

void HeadWeights::set(std::int64_t first, std::int64_t count, const void* rows) {
    const std::int64_t heads = std::int64_t(is_set_.size());
    require(first >= 0 && count >= 1 && first <= heads - count,
            "set_weights: heads " + std::to_string(first) + " to " + std::to_string(first + count - 1) +
                "; the layer has " + std::to_string(heads));
    for (std::int64_t i = 0; i < count; ++i) {
        set_head(first + i, static_cast<const std::uint8_t*>(rows) + i * (nope_ + value_) * rank_ * item_bytes_);
        num_set_ += !is_set_[first + i];
        is_set_[first + i] = true;
    }
}

/// Tiles of 16 outputs, [input][16]. The outputs of K are the latent's dims, those of V the head's own.
void HeadWeights::set_head(std::int64_t head, const std::uint8_t* rows) {
    std::uint8_t* const keys = bytes_.data() + head * head_bytes_;
    std::uint8_t* const values = keys + keys_bytes_;
    const auto place = [&](std::uint8_t* tiles, std::int64_t inputs, std::int64_t input, std::int64_t output) {
        return tiles + ((output / 16 * inputs + input) * 16 + output % 16) * item_bytes_;
    };
    for (std::int64_t row = 0; row < nope_; ++row, rows += rank_ * item_bytes_)
        for (std::int64_t dim = 0; dim < rank_; ++dim)
            std::memcpy(place(keys, nope_, row, dim), rows + dim * item_bytes_, item_bytes_);
    for (std::int64_t row = 0; row < value_; ++row, rows += rank_ * item_bytes_)
        for (std::int64_t dim = 0; dim < rank_; ++dim)
            std::memcpy(place(values, rank_, dim, row), rows + dim * item_bytes_, item_bytes_);
}

void HeadProductJob::prepare_queries(const LayerSpec& spec, const HeadWeights& weights, DType dtype,
                                     std::int64_t layer, const void* queries, void* absorbed, std::int64_t num_rows) {
    spec_ = &spec, weights_ = &weights, dtype_ = dtype, is_of_queries_ = true;
    parts_[0] = {queries, absorbed, dtype, dtype, num_rows, spec.sent_query_dim(), spec.key_dim};
    parts_[1] = {};
    start(layer);
}

void HeadProductJob::prepare_outputs(const LayerSpec& spec, const HeadWeights& weights, DType dtype,
                                     std::int64_t layer, const Payload& latents, const Payload& payload,
                                     std::int64_t num_rows, std::int64_t num_partials) {
    constexpr std::int64_t before = 2;  // max and sum
    spec_ = &spec, weights_ = &weights, dtype_ = dtype, is_of_queries_ = false;
    parts_[0] = {latents.out, payload.out, dtype, dtype, num_rows, spec.value_dim, spec.latent()->out_dim};
    parts_[1] = {latents.partials,  payload.partials,          DType::float32,
                 DType::float32,    num_partials,              before + spec.value_dim,
                 before + spec.latent()->out_dim, before,         before};
    start(layer);
}

void HeadProductJob::start(std::int64_t layer) {
    const std::int64_t products = (is_of_queries_ ? spec_->latent()->nope_dim : spec_->latent()->out_dim) * spec_->value_dim;
    const std::int64_t floats = std::max(product_scratch_floats(spec_->latent()->nope_dim, spec_->value_dim),
                                         product_scratch_floats(spec_->value_dim, spec_->latent()->out_dim));
    for (std::vector<float>& scratch : scratch_)
        if (std::int64_t(scratch.size()) < floats) scratch.resize(floats);
    const std::int64_t rows = parts_[0].num_rows + parts_[1].num_rows;
    const std::int64_t items = (num_chunks(parts_[0]) + num_chunks(parts_[1])) * spec_->num_heads;
    const std::int64_t bytes = items * products * item_bytes(dtype_);
    begin(layer, items, std::max(bytes, rows * spec_->num_heads * products / kMultiplyAddsPerByte), 0);
}

/// Items of one head are consecutive, so that its weights are read once.
void HeadProductJob::run(std::int64_t item, std::int64_t, int thread) noexcept {
    const std::int64_t own = num_chunks(parts_[0]), chunks = own + num_chunks(parts_[1]);
    const std::int64_t head = item / chunks, chunk = item % chunks;
    if (chunk < own)
        multiply(parts_[0], head, chunk * kItemRows, thread);
    else
        multiply(parts_[1], head, (chunk - own) * kItemRows, thread);
}

void HeadProductJob::multiply(const HeadRows& rows, std::int64_t head, std::int64_t first, int thread) {
    const std::int64_t count = std::min(kItemRows, rows.num_rows - first), place = first * spec_->num_heads + head;
    kernels_.multiply_by_head({
        .dtype = dtype_,
        .weights = is_of_queries_ ? weights_->keys(head) : weights_->values(head),
        .in_dtype = rows.in_dtype,
        .out_dtype = rows.out_dtype,
        .in = at(rows.in, place * rows.in_stride + rows.in_offset, rows.in_dtype),
        .out = at(rows.out, place * rows.out_stride + rows.out_offset, rows.out_dtype),
        .in_stride = spec_->num_heads * rows.in_stride,
        .out_stride = spec_->num_heads * rows.out_stride,
        .num_rows = count,
        .in_dim = int(is_of_queries_ ? spec_->latent()->nope_dim : spec_->value_dim),
        .out_dim = int(is_of_queries_ ? spec_->value_dim : spec_->latent()->out_dim),
        .scratch = scratch_[thread].data(),
    });
    for (std::int64_t row = first; row < first + count; ++row) copy(rows, head, row);
}

void HeadProductJob::copy(const HeadRows& rows, std::int64_t head, std::int64_t row) const {
    const std::int64_t place = row * spec_->num_heads + head;
    const std::uint8_t* const in = at(rows.in, place * rows.in_stride, rows.in_dtype);
    std::uint8_t* const out = at(rows.out, place * rows.out_stride, rows.out_dtype);
    const std::int64_t rotary = spec_->key_dim - spec_->value_dim;
    if (is_of_queries_)
        std::memcpy(at(out, spec_->value_dim, dtype_), at(in, spec_->latent()->nope_dim, dtype_),
                    rotary * item_bytes(dtype_));
    else
        std::memcpy(out, in, rows.in_offset * item_bytes(rows.in_dtype));
}

void Absorption::reserve(const std::vector<LayerSpec>& layers, std::int64_t num_queries, std::int64_t num_out,
                         std::int64_t num_partials) {
    std::int64_t query = 0, out = 0, partial = 0;
    for (const LayerSpec& layer : layers) {
        if (!layer.absorbs()) continue;
        query = std::max(query, layer.num_heads * layer.key_dim);
        out = std::max(out, layer.num_heads * layer.value_dim);
        partial = std::max(partial, layer.num_heads * node_floats(layer.value_dim));
    }
    const auto grow = [](auto& memory, std::int64_t size) {
        if (std::int64_t(memory.size()) < size) memory.resize(size);
    };
    grow(queries_, num_queries * query * item_bytes(dtype_));
    grow(out_, num_out * out * item_bytes(dtype_));
    grow(partials_, num_partials * partial);
    num_queries_ = num_queries, num_out_ = num_out, num_partials_ = num_partials;
}

Payload Absorption::prepare(const LayerSpec& spec, const HeadWeights& weights, std::int64_t layer,
                            const Payload& payload) {
    const Payload between{queries_.data(), payload.keys, payload.values, out_.data(), partials_.data()};
    before.prepare_queries(spec, weights, dtype_, layer, payload.queries, queries_.data(), num_queries_);
    after.prepare_outputs(spec, weights, dtype_, layer, between, payload, num_out_, num_partials_);
    return between;
}

}  // namespace rworker
