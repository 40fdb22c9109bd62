// Rows that prefill workers store have the same bytes as appended rows, in any pieces and any order.
#include <string>
#include <vector>

#include "check.hpp"
#include "incoming_rows.hpp"

using namespace incoming_tests;

namespace {

/// The prefix of an incoming sequence reads as what its source exports.
void check_prefix(Worker& worker, std::int64_t job_id, std::int64_t source_id, std::int64_t context) {
    for (const std::int64_t start : {std::int64_t(0), context / 3, context - 1}) {
        const std::int64_t num_tokens = context - start;
        std::vector<std::uint8_t> wanted(worker.export_bytes(source_id, start, num_tokens)), found;
        worker.export_sequence(source_id, start, num_tokens, wanted.data());
        for (std::int64_t layer = 0; layer < kLayers; ++layer) {
            std::vector<std::uint8_t> bytes(num_tokens * worker.cache().token_bytes(layer));
            worker.read_prefix(job_id, layer, {bytes.data(), start, num_tokens});
            found.insert(found.end(), bytes.begin(), bytes.end());
        }
        CHECK(found == wanted);
    }
}

/// Sequence 1 is appended; sequence 2, a fork of its first `context` tokens, is stored in pieces cut at `cuts`, the last
/// piece first, and reads its prefix before each. Then both grow by a row.
void check_stored(DType kv_dtype, const std::string& isa, std::int64_t context, std::int64_t end,
                  std::vector<std::int64_t> cuts) {
    Worker worker = make_worker(kv_dtype, isa);
    const std::vector<Data> data{Data(end + 1, 1), Data(end + 1, 2)};
    append(worker, 9, {Data(500, 3), Data(500, 4)}, 0, 500);  // so that blocks hold other data before
    control(worker, {{Verb::release, 9, 0, 0}});
    append(worker, 1, data, 0, end);
    if (context > 0) control(worker, {{Verb::fork, 2, 1, context}, {Verb::reserve, 2, 7, end}});
    if (context == 0) control(worker, {{Verb::reserve, 2, 7, end}});
    cuts.insert(cuts.begin(), context), cuts.push_back(end);
    for (std::size_t i = cuts.size() - 1; i > 0; --i) {
        if (context > 0) check_prefix(worker, 7, 1, context);
        for (std::int64_t layer = 0; layer < kLayers; ++layer)
            worker.store(7, layer, data[layer].rows(cuts[i - 1], cuts[i]));
    }
    if (context > 0) check_prefix(worker, 7, 1, context);
    control(worker, {{Verb::commit, 2, 7, end}});
    CHECK(exported(worker, 1) == exported(worker, 2));
    for (const std::int64_t id : {1, 2}) append(worker, id, data, end, end + 1);
    CHECK(exported(worker, 1) == exported(worker, 2));
    CHECK(worker.statistics().incoming == 0);
    control(worker, {{Verb::release, 1, 0, 0}, {Verb::release, 2, 0, 0}});
    CHECK(worker.statistics().blocks_used == 0);
}

void test_stored_is_appended() {
    for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16, DType::int8, DType::int4})
        for (const char* isa : {"scalar", "auto"}) {
            check_stored(dtype, isa, 0, 100, {});
            check_stored(dtype, isa, 0, 97, {1, 2, 3, 20, 37, 40, 41, 64, 96});
            check_stored(dtype, isa, 5, 11, {7, 8});
            check_stored(dtype, isa, 37, 111, {38, 47, 55, 90});
            check_stored(dtype, isa, 64, 400, {66, 80, 215});
        }
}

void test_what_is_refused() {
    Worker worker = make_worker(DType::float32, "auto", 4);
    const Data data(128, 1);
    control(worker, {{Verb::reserve, 1, 7, 50}});
    CHECK(worker.statistics().blocks_free == 2 && worker.statistics().incoming == 1);
    worker.store(7, 0, data.rows(10, 20));
    CHECK_THROWS(worker.store(8, 0, data.rows(0, 10)), UnknownSequence);
    for (const std::int64_t layer : {-1, 2}) CHECK_THROWS(worker.store(7, layer, data.rows(0, 10)), Error);
    CHECK_THROWS(worker.store(7, 0, data.rows(19, 21)), Error);
    CHECK_THROWS(worker.store(7, 0, data.rows(40, 51)), Error);
    CHECK_THROWS(worker.cache().check_store(7, 0, -1, 2), Error);
    CHECK_THROWS(worker.cache().check_store(7, 0, 0, 0), Error);
    CHECK_THROWS(worker.cache().check_store(7, 0, 20, INT64_MAX), Error);
    CHECK_THROWS(control(worker, {{Verb::commit, 1, 7, 50}}), Error);
    CHECK_THROWS(control(worker, {{Verb::commit, 1, 8, 50}}), Error);
    CHECK_THROWS(control(worker, {{Verb::truncate, 1, 0, 0}}), Error);
    CHECK_THROWS(control(worker, {{Verb::reserve, 2, 7, 20}}), Error);
    CHECK_THROWS(control(worker, {{Verb::reserve, 2, 8, 20}, {Verb::reserve, 3, 8, 20}}), Error);
    CHECK_THROWS(control(worker, {{Verb::reserve, 2, 8, 20}, {Verb::commit, 2, 8, 20}}), Error);
    CHECK_THROWS(control(worker, {{Verb::release, 1, 0, 0}, {Verb::reserve, 2, 8, 129}}), Error);
    CHECK_THROWS(control(worker, {{Verb::reserve, 2, 8, 60}, {Verb::reserve, 3, 9, 32}}), Error);
    CHECK_THROWS(worker.begin_step({}, std::vector<std::vector<Span>>{{{1, 0, 1, SpanMode::attend}}}), Error);
    CHECK_THROWS(worker.export_bytes(1, 0, 0), Error);
    CHECK(worker.statistics().blocks_free == 2 && worker.statistics().sequences == 1);
    worker.store(7, 0, data.rows(0, 10));  // nothing of all that has changed the job
    worker.store(7, 0, data.rows(20, 50));
    worker.store(7, 1, data.rows(0, 50));
    control(worker, {{Verb::commit, 1, 7, 50}, {Verb::reserve, 2, 8, 40}});
    control(worker, {{Verb::release, 2, 0, 0}});
    CHECK_THROWS(worker.store(8, 0, data.rows(0, 40)), UnknownSequence);
    CHECK(worker.statistics().blocks_free == 2 && worker.cache().sequence(1).length == 50);
    control(worker, {{Verb::fork, 3, 1, 40}, {Verb::reserve, 3, 9, 60}});
    for (const std::int64_t layer : {-1, 2}) CHECK_THROWS(worker.cache().check_read(9, layer, 0, 40), Error);
    CHECK_THROWS(worker.cache().check_read(8, 0, 0, 40), UnknownSequence);
    CHECK_THROWS(worker.cache().check_read(9, 0, -1, 2), Error);
    CHECK_THROWS(worker.cache().check_read(9, 0, 0, 41), Error);
    CHECK_THROWS(worker.cache().check_read(9, 0, 40, 1), Error);
    CHECK_THROWS(worker.cache().check_read(9, 0, 39, 0), Error);
    CHECK_THROWS(worker.cache().check_read(9, 0, 39, INT64_MAX), Error);
    worker.cache().check_read(9, 0, 39, 1);
    control(worker, {{Verb::release, 3, 0, 0}});
    CHECK_THROWS(worker.cache().check_read(9, 0, 0, 40), UnknownSequence);
}

/// A job that stores nothing: what it reserved serves its prefix, and is as it was once that is over.
void test_a_holder_of_the_prefix_alone() {
    for (const std::int64_t length : {32, 40, 64}) {
        Worker worker = make_worker(DType::int8);
        append(worker, 1, {Data(100, 1), Data(100, 2)}, 0, 100);
        control(worker, {{Verb::fork, 2, 1, length}});
        const std::vector<std::uint8_t> before = exported(worker, 2);
        control(worker, {{Verb::reserve, 2, 7, length}});
        check_prefix(worker, 7, 1, length);
        CHECK_THROWS(worker.cache().check_store(7, 0, length, 1), Error);
        CHECK_THROWS(worker.cache().check_store(7, 0, length - 1, 1), Error);
        control(worker, {{Verb::commit, 2, 7, length}});
        CHECK(exported(worker, 2) == before && worker.statistics().incoming == 0);
        control(worker, {{Verb::reserve, 2, 8, length}});
        control(worker, {{Verb::release, 2, 0, 0}});
        CHECK(worker.statistics().incoming == 0);
    }
}

}  // namespace

void run_incoming_tests() {
    test_stored_is_appended();
    test_what_is_refused();
    test_a_holder_of_the_prefix_alone();
}
