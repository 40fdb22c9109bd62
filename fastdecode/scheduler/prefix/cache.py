"""Prefix caching: the blocks that a sequence can reuse from other sequences, and leaves for others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fastdecode.core.held import KnownTokens
from fastdecode.core.optional import optional
from fastdecode.scheduler.names import CacheIds, Names
from fastdecode.scheduler.places.place import Copy, Segment
from fastdecode.scheduler.places.workers import Workers
from fastdecode.scheduler.prefix.adopted import Adopted, Held
from fastdecode.scheduler.prefix.index import PrefixIndex, extend_hashes, usable_hashes
from fastdecode.scheduler.prefix.parked import Parked
from fastdecode.scheduler.prefix.retained import Retained
from fastdecode.scheduler.prefix.source import Hit, Keeper, Source
from fastdecode.scheduler.schedules import Limits
from fastdecode.scheduler.sequence import TokenSequence


class Leaders:
    """The sequences that compute a prefix now, by block hash. Other sequences with the same prefix wait for them."""

    def __init__(self, workers: Workers, index: PrefixIndex, kept: Keeper) -> None:
        self._workers, self._index, self._kept = workers, index, kept
        self._computing: dict[bytes, TokenSequence] = {}

    def __len__(self) -> int:
        """Return the number of blocks that are being computed, and for which other sequences may wait."""
        return len(self._computing)

    def begin(self, sequence: TokenSequence, num_blocks: int) -> None:
        """Record that ``sequence`` computes its prompt from block ``num_blocks`` on.
        Blocks that another sequence is already computing are not recorded.
        """
        for block_hash in sequence.block_hashes[num_blocks:]:
            self._computing.setdefault(block_hash, sequence)

    def stop(self, sequence: TokenSequence) -> None:
        """Let no sequence wait for ``sequence`` any more: its prompt is cached, or it gave up its cache."""
        for block_hash in sequence.block_hashes:
            if self._computing.get(block_hash) is sequence:
                del self._computing[block_hash]

    def leader_of(self, sequence: TokenSequence) -> TokenSequence | None:
        """Return a sequence that is computing a longer prefix of ``sequence`` than any cached one.
        Return None if there is none.
        """
        usable = usable_hashes(sequence, self._workers.block_size)
        for depth in range(len(usable), 0, -1):
            leader = self._computing.get(usable[depth - 1])
            if leader and self._kept.is_worth(sequence, depth) and self._kept.will_keep(leader, depth):
                return leader if depth > self._index.num_cached(sequence, usable, self._kept) else None
        return None


class PrefixCache:
    """Finds prefixes by asking its sources in order; the first source with a prefix of a sequence provides it.
    ``kept``: prefixes of this engine's sequences. ``adopted``: prefixes that an earlier engine left on R-workers.
    ``parked``: prefixes on R-workers' disks. ``leaders``: sequences that compute prefixes now. ``ids``: cache ids for
    kept prefixes. Disabled, the cache keeps nothing.
    """

    def __init__(self, workers: Workers, limits: Limits, enabled: bool, names: Names) -> None:
        self.enabled = enabled and (limits.kept_states > 0 or limits.sizes.rewinds)
        self.ids = CacheIds()
        self.num_queries = self.num_hit_tokens = 0
        self._workers, self._segment_tokens = workers, limits.placing.segment_tokens
        self._index, self.kept = self._keeper(limits, names)
        self.adopted = Adopted(workers, self._index, self.ids, self._segment_tokens, self.enabled)
        self.parked = Parked(workers, self._index, self.ids, self.kept, self._segment_tokens)
        self.leaders = Leaders(workers, self._index, self.kept)
        self.sources: Sequence[Source] = (self.adopted, self.kept, self.parked)

    def _keeper(self, limits: Limits, names: Names) -> tuple[PrefixIndex, Keeper]:
        """Return an index of prefixes, and an object that keeps prefixes: as blocks, or as recurrent states."""
        if limits.sizes.rewinds:
            index = PrefixIndex(self._workers, self._segment_tokens)
            return index, Retained(self._workers, index, self.ids, names, self.enabled)
        states = optional("kept states")
        by_end = states.StateIndex(self._workers, self._segment_tokens)
        most_kept = limits.kept_states * self.enabled
        worth, length = limits.sizes.worth, self._segment_tokens
        return by_end, states.States(self._workers, by_end, self.ids, names, most_kept, worth, length)

    def __len__(self) -> int:
        """Return the number of retained prefixes."""
        return sum(len(worker.prefixes) for worker in self._workers)

    @property
    def is_awaited(self) -> bool:
        """True while a sequence computes blocks for which other sequences may wait."""
        return len(self.leaders) > 0

    def arrive(self, sequence: TokenSequence) -> None:
        """Compute the hashes of the blocks that ``sequence`` will fill."""
        if self.enabled:
            tokens = sequence.tokens(0, sequence.num_prefill)
            extend_hashes(sequence.block_hashes, tokens, self._workers.block_size)
        self.kept.arrive(sequence)

    def hits(self, sequence: TokenSequence) -> dict[int, Hit]:
        """Return, by R-worker, the longest prefix of ``sequence`` that can be reused. A scored prompt has none."""
        if sequence.scored:
            return {}
        for source in self.sources:
            if found := source.hits(sequence):
                return found
        return {}

    def adopt(self, held: Held, known: Mapping[int, KnownTokens], lowest_name: int = 0) -> dict[int, int]:
        """Keep the tokens cached for an earlier engine: see :meth:`Adopted.adopt`."""
        return self.adopted.adopt(held, known, lowest_name)

    def ways(self, hit: Hit | None) -> tuple[Hit | None, ...]:
        """Return the cached prefixes from which to try to start, best first. None stands for a start without a prefix.
        It follows ``hit`` if starting copies a recurrent state: if no blocks are free for the copy, all is recomputed.
        """
        return (hit, None) if hit and self.kept.copies_all else (hit,)

    def begin(self, sequence: TokenSequence, hit: Hit | None) -> None:
        """Record that ``sequence`` starts from ``hit``, or from no cached prefix, and computes the rest."""
        if hit is None:
            self.close(sequence)
        if sequence.output_token_ids == []:
            self.num_queries += self.enabled
            sequence.num_hit_tokens = hit.num_tokens if hit else 0
            self.num_hit_tokens += sequence.num_hit_tokens
        self.leaders.begin(sequence, hit.num_blocks if hit else 0)

    def name(self, sequence: TokenSequence, segments: Sequence[Segment], hit: Hit | None) -> None:
        """Assign cache ids to ``segments``, with which ``sequence`` starts from ``hit``.
        Segments that continue in their old blocks keep their cache ids.
        """
        if len(segments) > 1 and hit and hit.is_own:
            ids = [each.prefix.prefix_id for each in hit.source.pieces(sequence, hit)]
        else:
            ids = [self.kept.name(sequence, hit)]
        ids += [self.ids.new() for _ in segments[len(ids) :]]
        for segment, cache_id in zip(segments, ids, strict=True):
            segment.cache_id = cache_id

    def close(self, sequence: TokenSequence) -> None:
        """Release the prefixes that are kept only for ``sequence``, which no longer needs them."""
        for source in self.sources:
            source.close(sequence)

    def leave(self, sequence: TokenSequence) -> bool:
        """Retain the cached tokens of ``sequence``, which gives up its cache.
        Return True if R-workers need not release them.
        """
        return any(source.leave(sequence) for source in self.sources)

    def forget_beyond(self, copy: Copy, num_tokens: int) -> None:
        """Cut the prefix that was retained from ``copy`` to ``num_tokens`` tokens, since later ones are wrong."""
        prefix = None if copy.prefix_id is None else self._workers[copy.worker].prefixes.get(copy.prefix_id)
        if prefix and len(prefix.blocks) > num_tokens // self._workers.block_size:
            self._index.shorten(prefix, num_tokens // self._workers.block_size)

    def forget_path(self, sequence: TokenSequence) -> None:
        """Evict the prefixes that share a block with ``sequence``, which has a token that is not finite.
        Only its R-workers are searched. Earlier tokens of a chunk may be NaN too, and others would reuse their blocks.
        """
        for worker in {copy.worker for segment in sequence.segments for copy in segment.copies}:
            for block_hash in sequence.block_hashes:
                while prefix := self._index.on(worker, block_hash):
                    self._index.shorten(prefix, 0)

    def make_room(self, worker: int, num_blocks: int) -> bool:
        """Evict prefixes on R-worker ``worker`` until ``num_blocks`` blocks are free.
        Return False if that is impossible.
        """
        return self._index.make_room(worker, num_blocks)

    def reset(self) -> None:
        """Evict all prefixes from R-workers' memory. Running sequences continue."""
        for index in range(len(self._workers)):
            self._index.clear(index)

    def doubt(self) -> None:
        """Evict all prefixes, and forget those on disks: they may depend on an R-worker that was found at fault."""
        self.reset()
        for index in range(len(self._workers)):
            self.parked.forget(index)

    def lose(self, worker: int) -> None:
        """Forget all prefixes of the lost R-worker ``worker``."""
        for source in self.sources:
            source.forget(worker)
