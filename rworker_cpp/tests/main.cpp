// All tests, or those that are named: `rworker_tests kernels threads`.
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

void run_cache_tests();
void run_commit_tests();
void run_ahead_tests();
void run_attention_tests();
void run_incoming_tests();
void run_incoming_thread_tests();
void run_kernel_tests();
void run_ring_tests();
void run_thread_tests();
void run_tile_tests();
void run_emulation_tests();
void run_self_test_tests();

struct Tests {
    const char* name;
    void (*run)();
};

const Tests kTests[] = {
#ifdef RWORKER_EMULATED
    {"tiles", run_tile_tests},  // before any thread, since it forks
#endif
    {"cache", run_cache_tests},
    {"commits", run_commit_tests},
    {"ahead", run_ahead_tests},
    {"attention", run_attention_tests},
    {"rings", run_ring_tests},  // before any test leaves threads behind, since it forks
    {"threads", run_thread_tests},
    {"incoming", run_incoming_tests},
    {"incoming_threads", run_incoming_thread_tests},
#ifndef __SANITIZE_THREAD__  // one thread's arithmetic
    {"kernels", run_kernel_tests},
    {"self_test", run_self_test_tests},
#endif
#ifdef RWORKER_EMULATED
    {"emulation", run_emulation_tests},
#endif
};

int main(int num_arguments, char** arguments) {
    const std::vector<std::string> named(arguments + 1, arguments + num_arguments);
    std::size_t num_run = 0;
    for (const Tests& tests : kTests)
        if (named.empty() || std::count(named.begin(), named.end(), tests.name) > 0) tests.run(), ++num_run;
    if (!named.empty() && num_run != named.size()) {
        std::fprintf(stderr, "there are no tests of one of the names that were given\n");
        return 2;
    }
    std::printf("%s R-worker tests passed\n", named.empty() ? "all" : "the named");
}
