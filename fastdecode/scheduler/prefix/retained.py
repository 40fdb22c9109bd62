"""The source of prefixes that this engine has computed; their full blocks are retained until others need the memory."""

from __future__ import annotations

from fastdecode.scheduler.names import CacheIds, Names
from fastdecode.scheduler.places.place import Copy, Segment
from fastdecode.scheduler.places.workers import Prefix, Workers
from fastdecode.scheduler.prefix.index import IndexedSource, PrefixIndex, extend_hashes, usable_hashes
from fastdecode.scheduler.prefix.source import Hit, Keeper
from fastdecode.scheduler.sequence import TokenSequence


class Retained(IndexedSource, Keeper):
    """Retains full blocks of prompts and outputs. Disabled, it retains nothing."""

    copies_all = False

    def __init__(self, workers: Workers, index: PrefixIndex, ids: CacheIds, names: Names, enabled: bool) -> None:
        super().__init__(workers, index)
        self.enabled = enabled
        self._ids, self._names = ids, names

    def hits(self, sequence: TokenSequence) -> dict[int, Hit]:
        """Return, by R-worker, the longest cached prefix, if it is at least as long as the rest of the prompt.
        With a shorter one, the start would be slower, since the rest of the prompt then attends on the R-worker. At
        least one token is always computed, since its logits are sampled.
        """
        found = self._index.longest(sequence, usable_hashes(sequence, self._workers.block_size), self)
        return {worker: hit for worker, hit in found.items() if self.is_worth(sequence, hit.num_blocks)}

    def arrive(self, sequence: TokenSequence) -> None:
        pass

    def name(self, sequence: TokenSequence, hit: Hit | None) -> int:
        return sequence.sequence_id

    def rows_to_stop(self, sequence: TokenSequence, most: int) -> int:
        return most

    def will_keep(self, leader: TokenSequence, num_blocks: int) -> bool:
        return True

    def is_worth(self, sequence: TokenSequence, num_blocks: int) -> bool:
        return 2 * num_blocks * self._workers.block_size >= sequence.num_prefill

    def leave(self, sequence: TokenSequence) -> bool:
        self._retain(sequence)
        return False

    def keep(self, sequence: TokenSequence) -> None:
        """Retain the prompt of ``sequence`` once it is fully cached."""
        if not sequence.in_prompt:
            self._retain(sequence)

    def _retain(self, sequence: TokenSequence) -> None:
        """Retain the full blocks of a running sequence; they replace the shorter prefix that was retained from it."""
        num_full = sequence.num_cached // self._workers.block_size
        if not self.enabled or num_full == 0:
            return
        num_tokens = num_full * self._workers.block_size
        extend_hashes(sequence.block_hashes, sequence.tokens(0, num_tokens), self._workers.block_size)
        origin = self._ids.new()
        for segment in sequence.segments[: sequence.num_closed + 1]:
            for copy in segment.copies:
                self._retain_copy(sequence, segment, copy, origin)

    def _retain_copy(self, sequence: TokenSequence, segment: Segment, copy: Copy, origin: int) -> None:
        first, count = segment.start // self._workers.block_size, segment.num_tokens // self._workers.block_size
        worker, hashes = self._workers[copy.worker], sequence.block_hashes[first : first + count]
        if count == 0:
            return
        if known := self._index.on(copy.worker, hashes[-1]):
            self._index.touch(known)
            return
        prefix = Prefix(self._ids.new(), copy.worker, hashes, copy.share(count), origin)
        self._index.add(prefix)
        worker.fork(prefix.prefix_id, segment.cache_id, count * self._workers.block_size)
        if copy.prefix_id is not None and (before := worker.prefixes.get(copy.prefix_id)):
            self._index.shorten(before, 0)
        copy.prefix_id = prefix.prefix_id
        self._names.name(prefix.prefix_id, sequence.sequence_id, segment.start)
