// Many small and large jobs over several threads: the same bits as one thread, and nothing lost on the way.
#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "check.hpp"
#include "rworker/step_plan.hpp"
#include "rworker/thread_pool.hpp"
#include "rworker/worker.hpp"

using namespace rworker;

namespace {

class CountingJob final : public Job {
  public:
    CountingJob(std::int64_t num_items, bool worth_helpers) : counts(num_items) {
        num_items_ = num_items;
        worth_helpers_ = worth_helpers;
    }
    void run(std::int64_t item, std::int64_t, int) noexcept override {
        counts[item].fetch_add(1, std::memory_order_relaxed);
    }

    std::vector<std::atomic<int>> counts;
};

void test_every_item_runs_once() {
    ThreadPool pool(4, {});
    std::vector<std::unique_ptr<CountingJob>> jobs;
    for (int i = 0; i < 200; ++i) jobs.push_back(std::make_unique<CountingJob>(i % 7 * 50, i % 3 != 0));
    for (int round = 1; round <= 5; ++round) {
        for (const auto& job : jobs) pool.submit(*job);
        for (const auto& job : jobs) {
            job->wait();
            for (const auto& count : job->counts) CHECK(count.load() == round);
        }
    }
}

void test_the_caller_may_lead() {
    ThreadPool pool(3, {});
    CountingJob mine(200, true), theirs(200, true);
    for (int round = 1; round <= 200; ++round) {
        pool.run_here(mine);
        pool.submit(theirs);
        theirs.wait();
    }
    for (const auto* job : {&mine, &theirs})
        for (const auto& count : job->counts) CHECK(count.load() == 200);
}

void test_submitted_jobs_finish_before_the_pool_ends() {
    CountingJob first(1000, true), second(10, false);
    {
        ThreadPool pool(2, {});
        pool.submit(first);
        pool.submit(second);
    }
    CHECK(first.finished() && second.finished());
}

/// Output of two layers and two mini-batches in flight, 4 sequences of growing length.
std::vector<float> run_worker(int num_threads) {
    constexpr std::int64_t layers = 2, heads = 4, dim = 16, each = 2;
    const LayerSpec layer{{heads, 2, dim, dim, 0.25f, 0, 0.0f, {}}};
    Worker worker(
        {std::vector<LayerSpec>(layers, layer), DType::float32, DType::bfloat16, 16, 4000, num_threads, {}, "auto"});
    std::vector<float> outputs;
    std::int64_t length = 0;
    for (const std::int64_t rows : {530, 60, 1, 1, 30, 1}) {
        std::vector<std::vector<Span>> spans(2);
        const SpanMode mode = length ? SpanMode::attend : SpanMode::append;
        for (std::int64_t i = 0; i < 2 * each; ++i) spans[i % 2].push_back({i, length, rows, mode});
        worker.begin_step({}, spans);
        std::vector<float> data(each * rows * heads * dim);
        for (std::size_t i = 0; i < data.size(); ++i) data[i] = float(i * 7919 % 1009) / 500.0f - 1.0f;
        std::vector<std::vector<float>> out(2, std::vector<float>(data.size()));
        for (std::int64_t l = 0; l < layers; ++l) {
            for (std::int64_t m = 0; m < 2; ++m)
                worker.submit(m, l, {data.data(), data.data(), data.data(), out[m].data()});
            for (std::int64_t m = 0; m < 2; ++m) {
                worker.wait(m);
                outputs.insert(outputs.end(), out[m].begin(), out[m].end());
            }
        }
        worker.end_step();
        length += rows;
    }
    return outputs;
}

/// Outputs of sequences that fork at 1024 and 1600 of 1700 tokens, or were given the same tokens one by one.
std::vector<float> run_forks(int num_threads, bool share, std::int64_t* bytes_read) {
    constexpr std::int64_t heads = 2, dim = 16, count = 40, prefix = 1700;
    Worker worker({{{heads, 1, dim, dim, 0.25f, 1500, 0.0f, {}}},
                   DType::float32,
                   DType::bfloat16,
                   32,
                   count * (prefix / 32 + 2),
                   num_threads,
                   {},
                   "auto"});
    std::vector<float> data(prefix * dim);
    for (std::size_t i = 0; i < data.size(); ++i) data[i] = float(i * 7919 % 1009) / 500.0f - 1.0f;
    const auto run = [&](std::vector<Control> controls, std::vector<Span> spans, std::vector<float>& out) {
        worker.begin_step(controls, std::vector<std::vector<Span>>{spans});
        worker.submit(0, 0, {data.data(), data.data(), data.data(), out.data()});
        worker.wait(0);
        *bytes_read = worker.end_step().bytes_read;
    };
    const auto forked_at = [](std::int64_t i) -> std::int64_t { return i % 4 == 3 ? 1024 : 1600; };
    std::vector<float> none, out(count * 2 * heads * dim);
    run({}, {{0, 0, prefix, SpanMode::append}}, none);
    std::vector<Span> spans{{0, prefix, 2, SpanMode::attend}};
    for (std::int64_t i = 1; i < count; ++i) {
        share ? run({{Verb::fork, i, 0, forked_at(i)}}, {}, none) : run({}, {{i, 0, forked_at(i), SpanMode::append}}, none);
        spans.push_back({i, forked_at(i), 2, SpanMode::attend});
    }
    run({}, spans, out);
    return out;
}

void test_shared_prefixes() {
    std::int64_t separate_bytes = 0, shared_bytes = 0;
    const std::vector<float> separate = run_forks(1, false, &separate_bytes);
    for (const int num_threads : {1, 2, 4}) CHECK(run_forks(num_threads, true, &shared_bytes) == separate);
    CHECK(shared_bytes * 5 < separate_bytes);
}

/// Outputs of sequences of 90 tokens that had more, which their full tiles still held, or never had.
std::vector<float> run_cuts(int num_threads, bool had_more, bool in_one_call) {
    constexpr std::int64_t layers = 3, heads = 2, dim = 64, count = 8, kept = 90;
    const LayerSpec layer{{heads, 2, dim, dim, 0.25f, 0, 0.0f, {}}};
    Worker worker(
        {std::vector<LayerSpec>(layers, layer), DType::float32, DType::bfloat16, 32, 1000, num_threads, {}, "auto"});
    std::vector<float> data(count * kept * heads * dim);
    for (std::size_t i = 0; i < data.size(); ++i) data[i] = float(i * 7919 % 1009) / 500.0f - 1.0f;
    std::vector<float> outputs;
    const auto run = [&](const std::vector<Control>& controls, std::int64_t rows, std::int64_t context) {
        std::vector<Span> spans;
        for (std::int64_t i = 0; i < count && rows; ++i)
            spans.push_back({i, context, rows, context ? SpanMode::attend : SpanMode::append});
        worker.begin_step(controls, std::vector<std::vector<Span>>{spans});
        std::vector<float> out(context ? count * rows * heads * dim : 0);
        for (std::int64_t l = 0; l < layers && rows; ++l) {
            const Payload payload{data.data(), data.data(), data.data(), out.data()};
            if (in_one_call) {
                worker.run(0, l, payload);
            } else {
                worker.submit(0, l, payload);
                worker.wait(0);
            }
            outputs.insert(outputs.end(), out.begin(), out.end());
        }
    };
    const auto store = [&](std::int64_t rows, std::int64_t context) {
        run({}, rows, context);
        worker.end_step();
        outputs.clear();
    };
    store(kept, 0);
    if (had_more) store(10, kept);
    std::vector<Control> cuts;
    for (std::int64_t i = 0; i < count && had_more; ++i) cuts.push_back({Verb::truncate, i, 0, kept});
    run(cuts, 1, kept);
    worker.abandon_step();
    outputs.clear();
    run({}, 1, kept);
    worker.end_step();
    cuts.clear();
    for (std::int64_t i = 0; i < count; ++i) cuts.push_back({Verb::fork, count + i, i, kept - 5});
    run(cuts, 0, 0);
    worker.end_step();
    std::vector<std::uint8_t> copied(worker.export_bytes(count, 0, kept - 5));
    worker.export_sequence(count, 0, kept - 5, copied.data());
    outputs.insert(outputs.end(), copied.begin(), copied.end());
    return outputs;
}

void test_cuts_beside_the_step() {
    const std::vector<float> never_had = run_cuts(1, false, false);
    for (const int num_threads : {1, 3})
        for (const bool in_one_call : {false, true}) CHECK(run_cuts(num_threads, true, in_one_call) == never_had);
}

/// Outputs and states of six sequences with a recurrent layer, `cut` rows at a time of 24. With `refused` of them, every
/// step brings so many more, which the next one takes back; of every second step all stay, though they might go.
std::vector<float> run_states(int num_threads, std::int64_t cut, std::int64_t refused = 0) {
    constexpr std::int64_t count = 6, rows = 24, heads = 4, dim = 40;
    auto state = std::make_shared<StateSpec>(
        StateSpec{StateKind::delta, heads, 2, 24, dim, 4, 1, true, true, 0.2f, {}, {}, {}});
    state->filters.resize(4 * state->channels(), 0.3f);
    state->kept_rows = refused ? cut + refused : 0;
    const std::int64_t elements = state->row_elements(4);
    const LayerSpec recurrent{{heads, 0, 0, dim, 1.0f, 0, 0.0f, {}}, Recurrent{state}};
    Worker worker({{LayerSpec{{2, 1, 16, 16, 0.25f, 0, 0.0f, {}}}, recurrent},
                   DType::float32, DType::float32, 16, 2000, num_threads, {}, "auto"});
    std::vector<float> outputs(count * rows * heads * dim), none(count * (rows + refused) * 32);
    std::vector<Control> controls;
    for (std::int64_t done = 0; done < rows; done += cut) {
        const std::int64_t wrong = done / cut % 2 ? 0 : refused, all = cut + wrong;
        std::vector<Span> spans;
        std::vector<float> data(count * all * elements), out(count * all * heads * dim);
        for (std::int64_t i = 0; i < count; ++i) {
            spans.push_back({i, done, all, SpanMode::attend});
            for (std::int64_t j = 0; j < all * elements; ++j) {
                const float x = float((j + done * elements + i * 31) * 7919 % (j < cut * elements ? 1009 : 997)) / 500.0f - 1.0f;
                data[i * all * elements + j] = j % elements < state->channels() ? x : -x * x;
            }
        }
        worker.begin_step(controls, std::vector<std::vector<Span>>{spans});
        controls.clear();
        for (std::int64_t i = 0; wrong && i < count; ++i) controls.push_back({Verb::truncate, i, 0, done + cut});
        worker.run(0, 0, {none.data(), none.data(), none.data(), none.data()});
        worker.run(0, 1, {nullptr, data.data(), nullptr, out.data()});
        worker.end_step();
        for (std::int64_t i = 0; i < count; ++i)
            std::copy_n(out.data() + i * all * heads * dim, cut * heads * dim,
                        outputs.data() + (i * rows + done) * heads * dim);
    }
    std::vector<std::uint8_t> bytes(worker.export_bytes(2, 0, rows));
    worker.export_sequence(2, 0, rows, bytes.data());
    outputs.insert(outputs.end(), bytes.begin(), bytes.end());
    return outputs;
}

/// One KV head alone has pieces for many threads, though all rows attend to the split that they are stored into.
void test_a_prompt_by_itself_is_shared() {
    const LayerSpec layer{{128, 1, 24, 16, 0.2f, 0, 0.0f, {}}, Latent{}};
    KVCache cache({layer}, DType::bfloat16, 32, 4);
    const std::vector<Span> spans{{1, 0, 100, SpanMode::attend}};
    cache.begin_step({}, spans);
    CHECK(WorkList(cache, layer, spans).num_items > 32);
    cache.abandon_step();
}

}  // namespace

void run_thread_tests() {
    const std::vector<float> states = run_states(1, 24);
#ifdef __SANITIZE_THREAD__  // slow here, and threads share work alike for all values
    const std::initializer_list<std::int64_t> cuts = {2, 8}, counts = {3};
#else
    const std::initializer_list<std::int64_t> cuts = {1, 2, 3, 8}, counts = {1, 3, 6};
#endif
    for (const std::int64_t cut : {1, 2, 12}) CHECK(run_states(3, cut) == states);
    for (const std::int64_t cut : cuts)
        for (const std::int64_t refused : counts) CHECK(run_states(3, cut, refused) == states);
    test_a_prompt_by_itself_is_shared();
    test_shared_prefixes();
    test_cuts_beside_the_step();
    test_every_item_runs_once();
    test_the_caller_may_lead();
    test_submitted_jobs_finish_before_the_pool_ends();
    const std::vector<float> alone = run_worker(1);
    CHECK(run_worker(2) == alone);
    CHECK(run_worker(3) == alone);
}
