// Rows that prefill workers store: the same bytes as appended ones, in whatever pieces and order they come; and other
// sequences take steps meanwhile.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdio>
#include <thread>
#include <vector>

#include "check.hpp"
#include "rworker/worker.hpp"

using namespace rworker;

namespace {

constexpr std::int64_t kLayers = 2, kKvHeads = 2, kKeyDim = 20, kValueDim = 12;

Worker make_worker(DType kv_dtype, const std::string& isa = "auto", std::int64_t num_blocks = 64) {
    const LayerSpec layer{{4, kKvHeads, kKeyDim, kValueDim, 0.25f, 0, 0.0f, {}}};
    return Worker({std::vector<LayerSpec>(kLayers, layer), DType::float32, kv_dtype, 32, num_blocks, 2, {}, isa});
}

/// Rows of one sequence in one layer; every sequence and layer has others.
struct Data {
    std::vector<float> keys, values;

    Data(std::int64_t num_tokens, std::int64_t seed) {
        const auto fill = [&](std::vector<float>& floats, std::int64_t dim) {
            floats.resize(num_tokens * kKvHeads * dim);
            for (std::size_t i = 0; i < floats.size(); ++i)
                floats[i] = float((i + seed * 131) * 7919 % 1009) / 500.0f - 1.0f;
        };
        fill(keys, kKeyDim), fill(values, kValueDim);
    }
    IncomingRows rows(std::int64_t start, std::int64_t end) const {
        return {keys.data() + start * kKvHeads * kKeyDim, values.data() + start * kKvHeads * kValueDim, start,
                end - start, DType::float32};
    }
};

void control(Worker& worker, std::vector<Control> controls) {
    worker.begin_step(controls, std::vector<std::vector<Span>>{});
    worker.end_step();
}

/// Tokens [begin, end) as append-only rows.
void append(Worker& worker, std::int64_t sequence_id, const std::vector<Data>& layers, std::int64_t begin,
            std::int64_t end) {
    worker.begin_step({}, std::vector<std::vector<Span>>{{{sequence_id, begin, end - begin, SpanMode::append}}});
    for (std::int64_t layer = 0; layer < kLayers; ++layer) {
        const IncomingRows rows = layers[layer].rows(begin, end);
        worker.run(0, layer, {nullptr, rows.keys, rows.values, nullptr});
    }
    worker.end_step();
}

std::vector<std::uint8_t> exported(Worker& worker, std::int64_t sequence_id) {
    const std::int64_t length = worker.cache().sequence(sequence_id).length;
    std::vector<std::uint8_t> bytes(worker.export_bytes(sequence_id, 0, length));
    worker.export_sequence(sequence_id, 0, length, bytes.data());
    return bytes;
}

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

/// One thread reads prefix after prefix, and every third sequence is released meanwhile; the other takes steps, lets the
/// source of the prefixes go, and has its blocks written anew once no sequence holds them.
void test_reads_beside_steps() {
    constexpr std::int64_t jobs = 30, context = 96, tokens = 130;
    Worker worker = make_worker(DType::bfloat16, "auto", 40);
    std::atomic<std::int64_t> reserved = 0, read = 0;
    std::atomic<bool> is_right = true;
    const auto value_of = [](std::int64_t job) { return float(job % 100 + 1); };  // exact in bfloat16
    std::thread prefill([&] {
        std::vector<std::uint16_t> rows(context * kKvHeads * (kKeyDim + kValueDim));
        for (std::int64_t job = 0; job < jobs; ++job) {
            while (reserved.load() <= job) std::this_thread::yield();
            try {
                for (std::int64_t round = 0; round < 4; ++round)
                    for (std::int64_t layer = 0; layer < kLayers; ++layer) {
                        worker.read_prefix(job, layer, {reinterpret_cast<std::uint8_t*>(rows.data()), 0, context});
                        for (const std::uint16_t bits : rows)
                            if (std::bit_cast<float>(std::uint32_t(bits) << 16) != value_of(job)) is_right = false;
                    }
            } catch (const UnknownSequence&) {  // released
            }
            read.store(job + 1);
        }
    });
    for (std::int64_t job = 0; job < jobs; ++job) {
        Data same(tokens, 0);
        for (std::vector<float>* rows : {&same.keys, &same.values}) std::fill(rows->begin(), rows->end(), value_of(job));
        append(worker, 1, {same, same}, 0, context + 5);
        control(worker, {{Verb::fork, 2, 1, context}, {Verb::reserve, 2, job, tokens}});
        reserved.fetch_add(1);
        control(worker, {{Verb::release, 1, 0, 0}});
        append(worker, 3, {same, same}, 0, tokens);
        while (job % 3 != 2 && read.load() <= job) {
            control(worker, {{Verb::truncate, 3, 0, tokens - 1}});
            append(worker, 3, {same, same}, tokens - 1, tokens);
        }
        control(worker, {{Verb::release, 2, 0, 0}, {Verb::release, 3, 0, 0}});
    }
    prefill.join();
    CHECK(is_right);
    CHECK(worker.statistics().blocks_used == 0);
}

/// One thread stores sequence after sequence, and every third is released meanwhile; the other takes steps.
void test_stores_beside_steps() {
    constexpr std::int64_t jobs = 30, tokens = 150;
    Worker worker = make_worker(DType::bfloat16, "auto", 200);
    const std::vector<Data> data{Data(400, 1), Data(400, 2)};
    std::atomic<std::int64_t> reserved = 0, stored = 0;
    std::thread prefill([&] {
        for (std::int64_t job = 0; job < jobs; ++job) {
            while (reserved.load() <= job) std::this_thread::yield();
            try {
                for (std::int64_t layer = 0; layer < kLayers; ++layer)
                    for (const auto& [start, end] : {std::pair{70, 150}, std::pair{0, 33}, std::pair{33, 70}})
                        worker.store(job, layer, data[layer].rows(start, end));
            } catch (const UnknownSequence&) {  // released
            }
            stored.store(job + 1);
        }
    });
    std::int64_t committed = 0, length = 0;
    std::vector<float> queries(4 * kKeyDim, 0.5f), out(4 * kValueDim);
    while (committed < jobs) {
        std::vector<Control> controls;
        if (reserved.load() < jobs && reserved.load() < committed + 3)
            controls.push_back({Verb::reserve, 100 + reserved.load(), reserved.load(), tokens});
        const bool reserves = !controls.empty();
        if (committed < reserved.load() && committed % 3 == 2)
            controls.push_back({Verb::release, 100 + committed++, 0, 0});
        else if (committed < stored.load())
            controls.push_back({Verb::commit, 100 + committed, committed, tokens}), ++committed;
        worker.begin_step(controls, std::vector<std::vector<Span>>{{{1, length, 1, SpanMode::attend}}});
        if (reserves) reserved.fetch_add(1);
        for (std::int64_t layer = 0; layer < kLayers; ++layer) {
            const IncomingRows row = data[layer].rows(length % 400, length % 400 + 1);
            worker.run(0, layer, {queries.data(), row.keys, row.values, out.data()});
        }
        worker.end_step();
        if (++length == 1000) control(worker, {{Verb::truncate, 1, 0, 0}}), length = 0;
    }
    prefill.join();
    append(worker, 2, data, 0, tokens);
    const std::vector<std::uint8_t> wanted = exported(worker, 2);
    for (std::int64_t job = 0; job < jobs; ++job)
        if (job % 3 != 2) CHECK(exported(worker, 100 + job) == wanted);
    CHECK(worker.statistics().incoming == 0 && worker.statistics().sequences == jobs - jobs / 3 + 2);
}

/// Each thread reads a piece into its places, while another commits memory, and asks what is in use.
void test_blocks_of_a_file() {
    constexpr std::int64_t kTokens = 96, kCut = 32;
    Worker source = make_worker(DType::float32), target = make_worker(DType::float32);
    append(source, 1, {Data(kTokens, 0), Data(kTokens, 1)}, 0, kTokens);
    std::FILE* const file = std::tmpfile();
    std::vector<FilePiece> pieces{{kCut, 0, {}}, {kTokens - kCut, 0, {}}};
    std::int64_t start = 0, offset = 0;
    std::vector<Checksum> expected;
    for (FilePiece& piece : pieces) {
        std::vector<std::uint8_t> bytes(source.blocks_bytes(1, start, piece.num_tokens));
        source.export_blocks(1, start, piece.num_tokens, bytes.data());
        CHECK(std::fwrite(bytes.data(), 1, bytes.size(), file) == bytes.size());
        expected.push_back(checksum(bytes, piece.checksum));
        piece.offset = offset;
        start += piece.num_tokens, offset += std::int64_t(bytes.size());
    }
    std::fflush(file);
    std::atomic<bool> done{false};
    std::thread beside([&] {
        while (!done.load()) target.commit_blocks(target.cache().pool().num_touched() / 2, 8);
    });
    for (std::int64_t sequence_id = 1; sequence_id <= 10; ++sequence_id) {
        std::vector<FilePiece> wanted = pieces;
        CHECK(target.read_blocks(sequence_id, 0, fileno(file), wanted) == 0);
        for (std::size_t i = 0; i < wanted.size(); ++i) CHECK(wanted[i].checksum == expected[i]);
        CHECK(exported(target, sequence_id) == exported(source, 1));
    }
    done.store(true);
    beside.join();
    pieces[1].offset = offset;
    CHECK(target.read_blocks(11, 0, fileno(file), pieces) == ReadJob::kFileEnds);
    std::fclose(file);
}

}  // namespace

void run_incoming_tests() {
    test_blocks_of_a_file();
    test_stored_is_appended();
    test_what_is_refused();
    test_stores_beside_steps();
    test_a_holder_of_the_prefix_alone();
    test_reads_beside_steps();
}
