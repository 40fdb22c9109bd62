// Prefill workers store and read rows in threads of their own, while sequences take steps.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdio>
#include <thread>
#include <vector>

#include "check.hpp"
#include "incoming_rows.hpp"

using namespace incoming_tests;

namespace {

/// One thread reads prefix after prefix. The other takes steps, and releases every third sequence during its reads.
/// Each prefix's source is released too, so steps overwrite its blocks as soon as no sequence holds them.
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

/// One thread stores sequence after sequence. The other takes steps, and releases every third sequence meanwhile.
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

/// The worker's threads read pieces of a file into blocks, while another thread commits memory.
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
        for (std::int64_t block = 0; !done.load(); block = (block + 1) % 8) target.cache().commit_block(0, block);
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

void run_incoming_thread_tests() {
    test_blocks_of_a_file();
    test_stores_beside_steps();
    test_reads_beside_steps();
}
