// Lines that a kernel asks for ahead: those of the next chunk, in order and each once, whoever asks for them. In a
// translation unit of its own, since it sees prefetches by their name.
#include <cstdint>
#include <vector>

namespace {

std::vector<const std::uint8_t*> asked;

void log_prefetch(const void* line, int = 0, int = 3) { asked.push_back(static_cast<const std::uint8_t*>(line)); }

}  // namespace

#define __builtin_prefetch(...) log_prefetch(__VA_ARGS__)
#include "kernels/ahead.hpp"
#undef __builtin_prefetch

#include "check.hpp"

namespace {

constexpr int kChunkTiles = kChunkTokens / kTileTokens;
constexpr int kLines = 64, kTileBytes = kLines * kCacheLineBytes, kSteps = kLines;  // a step is a line of each tile
std::uint8_t memory[2 * kChunkTiles * kTileBytes + kTileBytes];

/// What `num_groups` groups of rows ask for over a chunk, line by line or between vectors, with a softmax of `rows`.
void ask_over_chunk(ReadAhead read_ahead, bool between, int num_groups, int rows, int softmax) {
    Coming coming;
    coming.key_lines = coming.value_lines = kLines, coming.read_ahead = read_ahead;
    for (int i = 0; i < kChunkTiles; ++i)  // values lie a gap behind keys
        coming.add({memory + i * kTileBytes, memory + (kChunkTiles + 1 + i) * kTileBytes});
    Ahead ahead(coming, num_groups, rows, softmax, 256);
    const auto product = [&] {
        for (int step = 0; step < num_groups * kSteps; ++step) {
            constexpr int bytes = kChunkTiles * kCacheLineBytes;
            if (!between) {
                ahead.ask<bytes>();
                continue;
            }
            ahead.begin_asking<bytes>();
            for (int line = 0; line < kChunkTiles; ++line) ahead.ask_one(line);
        }
    };
    asked.clear();
    product();
    for (int row = 0; row < rows; ++row) ahead.ask_for_row();
    product();
}

void test_each_line_is_asked_for_once(ReadAhead read_ahead, bool between, int num_groups, int rows, int softmax) {
    ask_over_chunk(read_ahead, between, num_groups, rows, softmax);
    std::vector<const std::uint8_t*> wanted;
    for (int i = 0; i < 2 * kChunkTiles * kLines; ++i)
        if (read_ahead == ReadAhead::pages) {
            const int tile = i % kStreams + (i % kStreams >= kChunkTiles);
            wanted.push_back(memory + tile * kTileBytes + i / kStreams * kCacheLineBytes);
        } else {
            wanted.push_back(memory + i * kCacheLineBytes + (i >= kChunkTiles * kLines ? kTileBytes : 0));
        }
    const std::size_t whole = wanted.size(), missed = whole / 50;  // shares of time are rounded
    CHECK(asked.size() >= whole - missed);
    for (std::size_t i = 0; i < asked.size(); ++i) CHECK(asked[i] == (i < whole ? wanted[i] : memory));
}

}  // namespace

void run_ahead_tests() {
    for (const ReadAhead read_ahead : {ReadAhead::run, ReadAhead::run_l2, ReadAhead::pages})
        for (const bool between : {false, true})
            for (const int num_groups : {1, 2, 6})
                for (const int softmax : {0, 16, 32})
                    test_each_line_is_asked_for_once(read_ahead, between, num_groups, 5 * num_groups, softmax);
}
