// Exports and imports sequences and blocks between steps.
#include "rworker/state_job.hpp"
#include "rworker/worker.hpp"

namespace rworker {

std::int64_t Worker::export_bytes(std::int64_t sequence_id, std::int64_t start, std::int64_t num_tokens) const {
    require(!in_step_, "export: a step is open; end_step or abandon_step comes first");
    cache_.check_export(sequence_id, start, num_tokens);
    return cache_.sequence_bytes(num_tokens) + cache_.state_bytes(sequence_id, start + num_tokens);
}

void Worker::export_sequence(std::int64_t sequence_id, std::int64_t start, std::int64_t num_tokens,
                             std::uint8_t* out) {
    export_bytes(sequence_id, start, num_tokens);
    if (cache_.has_state_at(sequence_id, start + num_tokens))
        settle_state(cache_, state_kernels(kernels_), model_dtype_, sequence_id, start + num_tokens);
    cache_.export_sequence(sequence_id, start, num_tokens, out);
}

void Worker::import_sequence(std::int64_t sequence_id, std::int64_t start, std::int64_t num_tokens,
                             std::span<const std::uint8_t> data) {
    require(!in_step_, "import: a step is open; end_step or abandon_step comes first");
    cache_.import_sequence(sequence_id, start, num_tokens, data);
}

std::int64_t Worker::blocks_bytes(std::int64_t sequence_id, std::int64_t start, std::int64_t num_tokens) const {
    require(!in_step_, "export: a step is open; end_step or abandon_step comes first");
    cache_.check_export(sequence_id, start, num_tokens);
    return cache_.blocks_bytes(start, num_tokens);
}

void Worker::export_blocks(std::int64_t sequence_id, std::int64_t start, std::int64_t num_tokens,
                           std::uint8_t* out) const {
    blocks_bytes(sequence_id, start, num_tokens);
    cache_.export_blocks(sequence_id, start, num_tokens, out);
}

void Worker::import_blocks(std::int64_t sequence_id, std::int64_t start, std::int64_t num_tokens,
                           std::span<const std::uint8_t> data) {
    require(!in_step_, "import: a step is open; end_step or abandon_step comes first");
    cache_.import_blocks(sequence_id, start, num_tokens, data);
}

int Worker::read_blocks(std::int64_t sequence_id, std::int64_t start, int fd, std::span<FilePiece> pieces) {
    require(!in_step_, "import: a step is open; end_step or abandon_step comes first");
    const std::int64_t first = start;
    std::int64_t num_tokens = 0;
    for (const FilePiece& piece : pieces) {
        require(piece.num_tokens > 0 && piece.offset >= 0, "import: a piece has no tokens, or a negative file offset");
        cache_.blocks_bytes(start + num_tokens, piece.num_tokens);
        num_tokens += piece.num_tokens;
    }
    cache_.place_blocks(sequence_id, start, num_tokens);
    std::vector<std::vector<std::span<std::uint8_t>>> places;
    for (const FilePiece& piece : pieces) {
        places.push_back(cache_.block_runs(sequence_id, start, piece.num_tokens));
        start += piece.num_tokens;
    }
    ReadJob job(fd, pieces, std::move(places));
    pool_.run_here(job);
    cache_.note_full(sequence_id, first);
    return job.error();
}

}  // namespace rworker
