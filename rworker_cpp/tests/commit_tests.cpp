// Memory of blocks is committed ahead while the worker is idle, within bounds, and keeps its content.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <vector>

#include "check.hpp"
#include "rworker/commit_ahead.hpp"

using namespace rworker;

namespace {

using Piece = CommitAhead::Piece;
constexpr double kIdleTime = 2 * CommitAhead::kQuietSeconds;

KVCache idle_cache(std::int64_t num_blocks) {
    const LayerSpec layer{{4, 4, 64, 64, 1.0f, 0, 0.0f, {}}};
    return KVCache({layer, layer}, DType::float32, 256, num_blocks);  // 512 KiB per layer and block
}

/// Runs until `ends` is set.
class LongJob final : public Job {
  public:
    LongJob() { num_items_ = 1; }
    void run(std::int64_t, std::int64_t, int) noexcept override { ends.wait(false); }

    std::atomic<bool> ends{false};
};

void test_used_blocks_are_taken_first() {
    BlockPool pool(8);
    for (std::int32_t block = 0; block < 4; ++block) CHECK(pool.take() == block);
    pool.drop_reference(1);
    pool.drop_reference(3);
    CHECK(pool.take() == 3 && pool.take() == 1 && pool.num_touched() == 4);
    CHECK(pool.take() == 4 && pool.num_touched() == 5);
}

void test_pieces_end_where_they_were_asked_to() {
    const KVCache cache = idle_cache(16);
    const ThreadPool pool(1, {});
    CommitAhead ahead(cache, pool, {});
    CHECK(ahead.commit_piece(kIdleTime) == Piece::none && ahead.end() == 0);
    ahead.aim(3);
    for (std::int64_t piece = 1; piece <= 6; ++piece) {
        CHECK(ahead.commit_piece(kIdleTime) == Piece::committed);
        CHECK(ahead.end() == piece / 2);  // a block counts once both layers are committed
    }
    CHECK(ahead.commit_piece(kIdleTime) == Piece::none);
    ahead.aim(1);
    CHECK(ahead.commit_piece(kIdleTime) == Piece::none && ahead.end() == 3);
}

void test_no_piece_begins_while_work_waits() {
    const KVCache cache = idle_cache(16);
    ThreadPool pool(1, {});
    CommitAhead ahead(cache, pool, {});
    ahead.aim(16);
    ahead.begin_step(0.0);
    CHECK(ahead.commit_piece(1e9) == Piece::busy);  // an open step may last
    ahead.end_step(1.0);
    CHECK(ahead.commit_piece(1.0 + CommitAhead::kQuietSeconds / 2) == Piece::busy);
    CHECK(ahead.commit_piece(1.0 + kIdleTime) == Piece::committed);
    LongJob job;
    pool.submit(job);
    CHECK(ahead.commit_piece(1.0 + kIdleTime) == Piece::busy);
    job.ends.store(true);
    job.ends.notify_all();
    job.wait();
    CHECK(ahead.commit_piece(1.0 + kIdleTime) == Piece::committed && ahead.end() == 1);
}

void test_blocks_of_a_step_need_no_piece() {
    KVCache cache = idle_cache(16);
    const ThreadPool pool(1, {});
    CommitAhead ahead(cache, pool, {});
    ahead.aim(4);
    CHECK(ahead.commit_piece(kIdleTime) == Piece::committed);  // a layer of block 0
    const std::vector<Span> spans{{1, 0, 600, SpanMode::append}};
    cache.begin_step({}, spans);
    CHECK(cache.pool().num_touched() == 3 && ahead.commit_piece(kIdleTime) == Piece::committed && ahead.end() == 3);
    CHECK(ahead.commit_piece(kIdleTime) == Piece::committed && ahead.end() == 4);
    cache.commit_step();
}

#ifdef __linux__
std::int64_t resident_bytes(const std::uint8_t* data, std::int64_t num_bytes) {
    const std::int64_t page = sysconf(_SC_PAGESIZE), skipped = -reinterpret_cast<std::intptr_t>(data) & (page - 1);
    std::vector<unsigned char> resident((num_bytes - skipped) / page);
    CHECK(mincore(const_cast<std::uint8_t*>(data) + skipped, resident.size() * page, resident.data()) == 0);
    std::int64_t count = 0;
    for (const unsigned char each : resident) count += each & 1;
    return count * page;
}

/// The first layer has 16 MiB. Of these, 2 MiB are asked for; the system may add as much, where pages are huge.
void test_memory_is_resident_and_bounded() {
    const KVCache cache = idle_cache(32);
    const HeadView view = cache.view(0, 0, nullptr);
    const std::int64_t block_bytes = view.block_stride_bytes, most = std::int64_t(4) << 20;
    view.base[0] = 42;
    const ThreadPool pool(1, {});
    CommitAhead ahead(cache, pool, {});
    ahead.aim(4);
    while (ahead.commit_piece(kIdleTime) == Piece::committed) continue;
    CHECK(view.base[0] == 42 && view.base[4 * block_bytes - 1] == 0);
    const std::int64_t resident = resident_bytes(view.base, 32 * block_bytes);
    constexpr int kPopulateWrite = 23;
    const std::int64_t page = sysconf(_SC_PAGESIZE);
    void* const probe = mmap(nullptr, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (Arena::can_commit() && madvise(probe, page, kPopulateWrite) == 0)
        CHECK(resident >= 4 * block_bytes - page);
    munmap(probe, page);
    CHECK(resident <= 4 * block_bytes + most);
}
#endif

}  // namespace

void run_commit_tests() {
    test_used_blocks_are_taken_first();
    test_pieces_end_where_they_were_asked_to();
    test_no_piece_begins_while_work_waits();
    test_blocks_of_a_step_need_no_piece();
#ifdef __linux__
    test_memory_is_resident_and_bounded();
#endif
}
