#include <cstdio>

void run_cache_tests();
void run_ahead_tests();
void run_attention_tests();
void run_incoming_tests();
void run_ring_tests();
void run_thread_tests();
void run_tile_tests();
void run_emulation_tests();
void run_self_test_tests();

int main() {
#ifdef RWORKER_EMULATED
    run_tile_tests();  // before any thread, since it forks
#endif
    run_cache_tests();
    run_ahead_tests();
    run_attention_tests();
    run_ring_tests();  // before any test leaves threads behind, since it forks
    run_thread_tests();
    run_incoming_tests();
#ifndef __SANITIZE_THREAD__  // one thread's arithmetic
    run_self_test_tests();
#endif
#ifdef RWORKER_EMULATED
    run_emulation_tests();
#endif
    std::puts("all R-worker tests passed");
}
