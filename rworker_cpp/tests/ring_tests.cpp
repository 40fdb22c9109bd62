// The ring between processes: words in order, asleep or spinning, full and empty, and through fork.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "check.hpp"
#include "rworker/ring.hpp"
#include "rworker/types.hpp"

using namespace rworker;

namespace {

void test_words_come_in_order() {
    RingState state{};
    Ring writer(&state), reader(&state);
    CHECK(!reader.pop(0));
    for (std::uint64_t round = 0; round < 5; ++round) {
        for (std::uint64_t i = 0; i < RingState::kCapacity; ++i) writer.push(round << 40 | i);
        CHECK_THROWS(writer.push(0), Error);
        for (std::uint64_t i = 0; i < RingState::kCapacity; ++i) CHECK(reader.pop(0) == (round << 40 | i));
        CHECK(!reader.pop(0.001));
    }
}

void test_threads_pass_every_word() {
    RingState there{}, back{};
    std::thread echo([&] {
        Ring in(&there), out(&back);
        for (int i = 0; i < 20000;)
            if (const auto word = in.pop(1.0)) out.push(*word + 1), ++i;
    });
    Ring out(&there), in(&back);
    for (std::uint64_t i = 0; i < 20000; ++i) {
        if (i % 1000 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // let the other fall asleep
        out.push(i);
        std::optional<std::uint64_t> word;
        while (!word) word = in.pop(1.0);
        CHECK(*word == i + 1);
    }
    echo.join();
}

void test_processes_wake_each_other() {
    void* memory = mmap(nullptr, 2 * sizeof(RingState), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    auto* states = static_cast<RingState*>(memory);
    const pid_t child = fork();
    if (child == 0) {
        Ring in(&states[0]), out(&states[1]);
        for (int i = 0; i < 100;)
            if (const auto word = in.pop(1.0)) out.push(*word * 2), ++i;
        _exit(0);
    }
    Ring out(&states[0]), in(&states[1]);
    for (std::uint64_t i = 0; i < 100; ++i) {
        usleep(100);
        out.push(i);
        std::optional<std::uint64_t> word;
        while (!word) word = in.pop(10.0);
        CHECK(*word == 2 * i);
    }
    int status = 1;
    waitpid(child, &status, 0);
    CHECK(status == 0);
    munmap(memory, 2 * sizeof(RingState));
}

}  // namespace

void run_ring_tests() {
    test_words_come_in_order();
    test_processes_wake_each_other();
    test_threads_pass_every_word();
}
