// Tables and reference counts: fork, truncate, release, out of blocks, abandon.
#include <vector>

#include "check.hpp"
#include "rworker/kv_cache.hpp"

using namespace rworker;

namespace {

KVCache make_cache(std::int64_t num_blocks) {
    return KVCache({{2, 1, 8, 8, 1.0f, 0, 0.0f, {}}}, DType::float32, 16, num_blocks);
}

void step(KVCache& cache, std::vector<Control> controls, std::vector<Span> spans) {
    cache.begin_step(controls, spans);
    cache.commit_step();
}

void test_fork_shares_full_blocks() {
    KVCache cache = make_cache(8);
    step(cache, {}, {{1, 0, 40, SpanMode::attend}});
    CHECK(cache.pool().num_free() == 5);
    step(cache, {{Verb::fork, 2, 1, 32}}, {});
    CHECK(cache.pool().num_free() == 5);
    step(cache, {{Verb::fork, 3, 1, 40}}, {});
    CHECK(cache.pool().num_free() == 4);
    CHECK(cache.sequence(3).blocks[1] == cache.sequence(1).blocks[1]);
    CHECK(cache.sequence(3).blocks[2] != cache.sequence(1).blocks[2]);
    step(cache, {{Verb::truncate, 2, 0, 20}}, {});  // block 1 is shared, so its part is copied
    CHECK(cache.pool().num_free() == 3);
    step(cache, {{Verb::release, 1, 0, 0}, {Verb::release, 2, 0, 0}, {Verb::release, 3, 0, 0}}, {});
    CHECK(cache.pool().num_free() == 8);
}

void test_errors_change_nothing() {
    KVCache cache = make_cache(4);
    step(cache, {}, {{1, 0, 20, SpanMode::attend}});
    const std::vector<std::int32_t> blocks = cache.sequence(1).blocks;
    const std::vector<Control> controls{{Verb::fork, 2, 1, 20}, {Verb::truncate, 1, 0, 3}, {Verb::release, 1, 0, 0}};
    CHECK_THROWS(cache.begin_step(controls, std::vector<Span>{{2, 20, 100, SpanMode::attend}}), Error);
    CHECK_THROWS(cache.begin_step(controls, std::vector<Span>{{1, 20, 1, SpanMode::attend}}), UnknownSequence);
    CHECK_THROWS(step(cache, {}, {{1, 20, 1, SpanMode::attend}, {1, 20, 1, SpanMode::attend}}), Error);
    CHECK_THROWS(step(cache, {{Verb::release, 7, 0, 0}}, {}), UnknownSequence);
    CHECK(cache.sequence(1).blocks == blocks && cache.sequence(1).length == 20);
    CHECK(cache.pool().num_free() == 2 && cache.sequence_ids() == std::vector<std::int64_t>{1});
}

void test_abandon_returns_blocks() {
    KVCache cache = make_cache(8);
    step(cache, {}, {{1, 0, 10, SpanMode::attend}});
    cache.begin_step(std::vector<Control>{{Verb::fork, 2, 1, 10}},
                     std::vector<Span>{{1, 10, 50, SpanMode::attend}, {2, 10, 1, SpanMode::attend}, {3, 0, 17, SpanMode::attend}});
    CHECK(cache.pool().num_free() == 1);
    cache.abandon_step();
    CHECK(cache.pool().num_free() == 6 && cache.sequence(1).blocks.size() == 1 && cache.sequence(2).length == 10);
    CHECK_THROWS(cache.sequence(3), UnknownSequence);
}

void test_export_and_import() {
    const std::vector<LayerSpec> layers{{{2, 1, 7, 8, 1.0f, 0, 0.0f, {}}}, {{2, 2, 24, 5, 1.0f, 0, 0.0f, {}}}};
    KVCache small(layers, DType::bfloat16, 16, 8), large(layers, DType::bfloat16, 64, 2);
    std::vector<std::uint8_t> data(small.sequence_bytes(40));
    CHECK(data.size() == 40 * 2 * (1 * (7 + 8) + 2 * (24 + 5)));
    for (std::size_t i = 0; i < data.size(); ++i) data[i] = std::uint8_t(i * 7 + i / 256);
    small.import_sequence(1, 0, 40, data);
    CHECK(small.pool().num_free() == 5 && small.sequence(1).length == 40);
    std::vector<std::uint8_t> there(data.size()), back(data.size());
    small.export_sequence(1, 0, 40, there.data());
    large.import_sequence(1, 0, 40, there);
    large.export_sequence(1, 0, 40, back.data());
    CHECK(there == data && back == data);
    CHECK_THROWS(large.import_sequence(1, 0, 40, data), Error);
    CHECK_THROWS(large.import_sequence(2, 0, 39, data), Error);
    CHECK_THROWS(large.import_sequence(2, 0, 100, data), Error);
    CHECK_THROWS(large.export_sequence(2, 0, 40, back.data()), UnknownSequence);
    CHECK(large.pool().num_free() == 1 && large.sequence_ids() == std::vector<std::int64_t>{1});
    std::vector<std::uint8_t> first(small.sequence_bytes(32)), rest(small.sequence_bytes(8));
    small.export_sequence(1, 0, 32, first.data());
    small.export_sequence(1, 32, 8, rest.data());
    KVCache pieces(layers, DType::bfloat16, 16, 8);
    pieces.import_sequence(1, 0, 32, first);
    CHECK_THROWS(pieces.import_sequence(1, 16, 8, rest), Error);
    pieces.import_sequence(1, 32, 8, rest);
    pieces.export_sequence(1, 0, 40, back.data());
    CHECK(back == data && pieces.pool().num_free() == 5);
    CHECK_THROWS(pieces.import_sequence(1, 40, 8, rest), Error);
    CHECK_THROWS(pieces.export_sequence(1, 33, 8, back.data()), Error);
    step(small, {{Verb::fork, 2, 1, 40}}, {{2, 40, 8, SpanMode::attend}});
    CHECK(small.pool().num_shared() == 2 && small.pool().num_touched() == 4);
}

}  // namespace

void run_cache_tests() {
    test_fork_shares_full_blocks();
    test_errors_change_nothing();
    test_abandon_returns_blocks();
    test_export_and_import();
}
