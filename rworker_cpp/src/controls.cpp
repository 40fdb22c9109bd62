// Applies the control verbs of a step. `reserve` and `commit` are in incoming.cpp.
#include <string>

#include "rworker/kv_cache.hpp"

namespace rworker {

void KVCache::apply(const Control& control) {
    switch (control.verb) {
        case Verb::fork:
            return fork(control);
        case Verb::truncate:
            return truncate(control);
        case Verb::release:
            return release(control);
        case Verb::reserve:
            return reserve(control);
        case Verb::commit:
            return commit(control);
    }
    throw Error("controls: verb " + std::to_string(std::int64_t(control.verb)) +
                " is unknown; it must be 0 (fork), 1 (truncate), 2 (release), 3 (reserve) or 4 (commit)");
}

void KVCache::fork(const Control& control) {
    const Sequence& source = sequence(control.source_id);
    if (sequences_.contains(control.sequence_id))
        throw Error("fork: " + name_of(control.sequence_id) + " exists already");
    if (control.num_tokens < 0 || control.num_tokens > source.length)
        throw Error("fork: num_tokens is " + std::to_string(control.num_tokens) + ", but " +
                    name_of(control.source_id) + " holds " + std::to_string(source.length) + " tokens");
    if (source.job_id && control.num_tokens % block_size_ != 0)
        throw Error("fork: num_tokens is " + std::to_string(control.num_tokens) + ", but " + name_of(control.source_id) +
                    " is incoming, and only its whole blocks can be shared");
    if (!source.state_blocks.empty() && (control.num_tokens != source.length || source.state_spoilt))
        throw Error("fork: " + name_of(control.source_id) + " has a state, which covers all its tokens");
    const std::int64_t num_full = control.num_tokens / block_size_;
    Sequence copy{{source.blocks.begin(), source.blocks.begin() + num_full}, control.num_tokens, control.num_tokens};
    for (const std::int32_t block : copy.blocks) pool_.add_reference(block);
    if (control.num_tokens % block_size_ != 0) {
        copy.blocks.push_back(pool_.take());
        edits_.push_back({source.blocks[num_full], copy.blocks.back(), tile_cut(control.num_tokens, source.length)});
    }
    if (!source.state_blocks.empty()) take_state(copy);
    for (std::int64_t i = 0; i < (source.state_blocks.empty() ? 0 : states_.num_filled()); ++i)
        edits_.push_back({source.state_blocks[i], copy.state_blocks[i], -1});
    copy.kept = source.kept, copy.first_kept = source.first_kept, copy.num_kept = source.num_kept;
    copy.kept_lone = source.kept_lone, copy.state_base = source.state_base;
    remember(control.sequence_id);
    sequences_.emplace(control.sequence_id, std::move(copy));
}

void KVCache::truncate(const Control& control) {
    const std::int64_t length = whole_sequence(control.sequence_id).length;
    if (control.num_tokens < 0 || control.num_tokens > length)
        throw Error("truncate: num_tokens is " + std::to_string(control.num_tokens) + ", but " +
                    name_of(control.sequence_id) + " holds " + std::to_string(length) + " tokens");
    const std::int64_t num_refused = states_.num_blocks() ? length - control.num_tokens : 0;
    if (num_refused > sequence(control.sequence_id).num_kept)
        throw Error("truncate: " + name_of(control.sequence_id) + " has a state, which covers its first " +
                    std::to_string(length - sequence(control.sequence_id).num_kept) + " tokens");
    remember(control.sequence_id);
    Sequence& kept = sequences_.at(control.sequence_id);
    while (std::int64_t(kept.blocks.size()) > blocks_for(control.num_tokens)) {
        pool_.drop_reference(kept.blocks.back());
        kept.blocks.pop_back();
    }
    if (control.num_tokens % block_size_ != 0) {
        const std::int32_t last = kept.blocks.back();
        if (pool_.shared(last)) {
            kept.blocks.back() = pool_.take();
            pool_.drop_reference(last);
        }
        edits_.push_back({last, kept.blocks.back(), tile_cut(control.num_tokens, length)});
        checksums_.forget(kept.blocks.back());
    }
    kept.length = kept.pending_length = control.num_tokens;
    kept.num_kept -= num_refused;
}

void KVCache::release(const Control& control) {
    const Sequence& released = sequence(control.sequence_id);
    remember(control.sequence_id);
    if (released.job_id) closed_.push_back(*released.job_id);
    for (const std::vector<std::int32_t>& blocks : {released.blocks, released.state_blocks})
        for (auto block = blocks.rbegin(); block != blocks.rend(); ++block) pool_.drop_reference(*block);
    sequences_.erase(control.sequence_id);
}

void KVCache::remember(std::int64_t sequence_id) {
    const auto found = sequences_.find(sequence_id);
    before_.emplace_back(sequence_id, found == sequences_.end() ? std::nullopt : std::optional(found->second));
}

}  // namespace rworker
