// A job that computes one layer of one mini-batch, as the worker sees it.
#pragma once

#include "rworker/kv_cache.hpp"
#include "rworker/thread_pool.hpp"

namespace rworker {

/// Approximate number of multiply-adds that a thread computes in the time of reading one byte.
constexpr std::int64_t kMultiplyAddsPerByte = 4;

/// Rows of one mini-batch in one layer, in the model's dtype; see Worker::submit.
struct Payload {
    const void *queries, *keys, *values;
    void* out;
    float* partials = nullptr;  // of `read` and `partial` spans: [rows, num_heads, node_floats]
};

class LayerJob : public Job {
  public:
    std::int64_t layer() const { return layer_; }
    bool brief() const { return brief_; }  // true where waking a thread costs more than the job
    std::int64_t bytes_read() const { return bytes_read_; }

  protected:
    /// `cost`: bytes to read, with arithmetic counted as the bytes that could be read in its time.
    void begin(std::int64_t layer, std::int64_t num_items, std::int64_t cost, std::int64_t bytes_read) {
        constexpr std::int64_t kWorthHelpersBytes = 320'000;  // read by one thread while another wakes up (32 us)
        layer_ = layer;
        num_items_ = num_items;
        bytes_read_ = bytes_read;
        brief_ = cost <= kWorthHelpersBytes;
        worth_helpers_ = num_items > 1 && !brief_;
    }

  private:
    std::int64_t layer_ = 0, bytes_read_ = 0;
    bool brief_ = false;
};

}  // namespace rworker
