"""Prefix caching: what a sequence can take over from others, and what it leaves to them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

from fastdecode.core.held import KnownTokens
from fastdecode.core.placing import UNLIMITED
from fastdecode.scheduler.sequence import Sequence
from fastdecode.scheduler.store.adoption import Adoption, Held
from fastdecode.scheduler.store.names import Names
from fastdecode.scheduler.store.place import Block, Copy, Segment
from fastdecode.scheduler.store.prefix_index import Hit, PrefixIndex, extend_hashes
from fastdecode.scheduler.store.workers import Prefix, Workers


class PrefixCache:
    """Retains full blocks of prompts and outputs until their room is needed; disabled it retains nothing.

    Retained sequences have negative ids on their R-workers, so that they meet no running one's.
    """

    def __init__(
        self,
        workers: Workers,
        enabled: bool,
        segment_tokens: int = UNLIMITED,
        index: Callable[[Workers], PrefixIndex] = PrefixIndex,
        names: Names | None = None,
    ) -> None:
        self.enabled = enabled
        self.segment_tokens = segment_tokens
        self.num_queries = 0
        self.num_hit_tokens = 0
        self._workers = workers
        self._index = index(workers)
        self._adoption, self._names = Adoption(workers, self._index, segment_tokens), names or Names(False)
        self._ids = itertools.count(-1, -1)
        self._computing: dict[bytes, Sequence] = {}

    def __len__(self) -> int:
        """Retained sequences."""
        return sum(len(worker.prefixes) for worker in self._workers)

    @property
    def is_awaited(self) -> bool:
        """True while a sequence computes blocks that others may follow."""
        return bool(self._computing)

    def arrive(self, sequence: Sequence) -> None:
        """Hash what ``sequence`` is about to compute."""
        if self.enabled:
            tokens = sequence.tokens(0, sequence.num_prefill)
            extend_hashes(sequence.block_hashes, tokens, self._workers.block_size)

    def hits(self, sequence: Sequence) -> dict[int, Hit]:
        """For each R-worker with a beginning worth taking: the number of its blocks, and the prefix that has them. Of
        one that goes on after another engine's end what is kept of itself.

        Worth taking is one at least as long as what remains, whose attention then runs on the R-worker. At least one
        token is always computed, since its logits are sampled.
        """
        if own := self._adoption.hits(sequence):
            return own
        self._adoption.close(sequence)  # of which there is no beginning, and whose name is given anew
        found = self._index.longest(sequence, self._usable(sequence))
        return {worker: hit for worker, hit in found.items() if self.is_worth(sequence, hit.num_blocks)}

    def lookup(self, sequence: Sequence) -> tuple[list[bytes], int]:
        """Hashes of the blocks that ``sequence`` could begin with, and how many of them are cached."""
        usable = self._usable(sequence)
        return usable, self._num_cached(sequence, usable)

    def is_within_another(self, prefix: Prefix) -> bool:
        """Whether a longer prefix of the same R-worker has all of ``prefix``."""
        return self._index.is_within_another(prefix)

    def now(self, seconds: float) -> None:
        """What is used from here on is used at ``seconds``."""
        self._index.now_seconds = seconds

    def take_back(self, prefix: Prefix) -> None:
        """Retain ``prefix``, which has come back: its R-worker has it, in blocks that are free here."""
        worker, count = self._workers[prefix.worker], len(prefix.block_hashes)
        prefix.blocks = [Block(num_sequences=0) for _ in range(count)]
        worker.free -= count
        worker.cached += count
        self._index.add(prefix)

    def ways(self, hit: Hit | None) -> tuple[Hit | None, ...]:
        """What a sequence may begin from where ``hit`` is the longest, best first."""
        return (hit,)

    def leader(self, sequence: Sequence) -> Sequence | None:
        """A sequence that is computing a longer beginning of ``sequence`` right now than any that is cached."""
        usable = self._usable(sequence)
        for depth in range(len(usable), 0, -1):
            leader = self._computing.get(usable[depth - 1])
            if leader and self.is_worth(sequence, depth) and self._leaves(leader, depth):
                return leader if depth > self._num_cached(sequence, usable) else None
        return None

    def new_id(self) -> int:
        """For something else than a sequence that R-workers hold."""
        return next(self._ids)

    def name(self, sequence: Sequence, hit: Hit | None) -> int:
        """What R-workers are to call the first segment of ``sequence``, which is about to start from ``hit``."""
        return sequence.sequence_id

    def until_stop(self, sequence: Sequence, most: int) -> int:
        """Rows of at most ``most`` of a prompt up to where it is to stop for something to be kept."""
        return most

    def pass_by(self, sequence: Sequence) -> None:
        """More of the prompt of ``sequence`` is cached."""

    def pieces(self, sequence: Sequence, hit: Hit) -> list[Hit]:
        """Return what ``hit`` has of each range of ``sequence``."""
        if own := self._adoption.pieces(sequence.sequence_id):
            return [*own[:-1], own[-1]._replace(prefix=hit.prefix)]
        whole = self.segment_tokens // self._workers.block_size
        ends = range(whole, hit.num_blocks, whole)
        found = [self._index.holder(sequence.block_hashes[end - 1]) for end in ends]
        last = Hit(hit.num_blocks - whole * len(ends), hit.prefix, hit.num_tokens - self.segment_tokens * len(ends))
        return [*(Hit(whole, prefix, self.segment_tokens) for prefix in found if prefix), last]

    def begin(self, sequence: Sequence, hit: Hit | None) -> None:
        """``sequence`` starts, from ``hit`` if it has one, and computes the rest for those that follow it."""
        if hit is None:
            self._adoption.close(sequence)
        if sequence.output_token_ids == []:
            self.num_queries += self.enabled
            sequence.num_hit_tokens = hit.num_tokens if hit else 0
            self.num_hit_tokens += sequence.num_hit_tokens
        for block_hash in sequence.block_hashes[hit.num_blocks if hit else 0 :]:
            self._computing.setdefault(block_hash, sequence)

    def begun(self, sequence: Sequence) -> None:
        """``sequence`` has begun: what is left of an engine before this one, and was not taken, is forgotten."""
        self._adoption.close(sequence)

    def goes_on(self, sequence: Sequence) -> bool:
        """Whether R-workers have kept ``sequence`` itself over another engine's end."""
        return bool(self._adoption.hits(sequence))

    def resumes(self, sequence: Sequence, hit: Hit) -> bool:
        """Whether ``sequence`` goes on in the blocks of ``hit``, also in those that are no other's."""
        return self._adoption.is_of(sequence, hit.prefix)

    def share_with(self, segment: Segment, copy: Copy, hit: Hit) -> None:
        """``copy`` of ``segment`` begins with what ``hit`` has on the same R-worker."""
        if hit.prefix.prefix_id == segment.cache_id:
            self._adoption.resume(segment, copy, hit)
            return
        worker = self._workers[hit.prefix.worker]
        self._index.touch(hit.prefix)
        segment.num_tokens = hit.num_tokens
        copy.shared = hit.prefix.blocks[: hit.num_blocks]
        worker.hold(copy.shared)
        worker.fork(segment.cache_id, hit.prefix.prefix_id, segment.num_tokens)

    def twin(self, sequence: Sequence, hit: Hit) -> Hit | None:
        """Return the same beginning of ``sequence`` on another R-worker, bit for bit, if there is one."""
        if self._adoption.is_of(sequence, hit.prefix):
            return self._adoption.twin(hit)
        twin = self._index.twin(hit.prefix, hit.num_blocks)
        return hit._replace(prefix=twin) if twin else None

    def stop_computing(self, sequence: Sequence) -> None:
        """No sequence need wait for ``sequence`` any more: its prompt is cached, or it left."""
        for block_hash in sequence.block_hashes:
            if self._computing.get(block_hash) is sequence:
                del self._computing[block_hash]

    def share(self, copy: Copy, num_blocks: int) -> list[Block]:
        """The first ``num_blocks`` full blocks of ``copy``, which others may hold from now on."""
        copy.shared += [Block() for _ in range(num_blocks - len(copy.shared))]
        return copy.shared[:num_blocks]

    def take_over(self, sequence: Sequence) -> bool:
        """Keep what ``sequence``, which gives up its cache, leaves. True where that is the cache as it is, so that no
        R-worker is to release it."""
        self.retain(sequence)
        return False

    def retain(self, sequence: Sequence) -> None:
        """Keep the full blocks of a running sequence, in place of what was kept of it before."""
        num_full = sequence.num_cached // self._workers.block_size
        if not self.enabled or num_full == 0:
            return
        num_tokens = num_full * self._workers.block_size
        extend_hashes(sequence.block_hashes, sequence.tokens(0, num_tokens), self._workers.block_size)
        origin = self.new_id()
        for segment in sequence.segments[: sequence.num_closed + 1]:
            for copy in segment.copies:
                self._retain(sequence, segment, copy, origin)

    def _retain(self, sequence: Sequence, segment: Segment, copy: Copy, origin: int) -> None:
        """Keep the full blocks of one copy of a segment."""
        first, count = segment.start // self._workers.block_size, segment.num_tokens // self._workers.block_size
        worker, hashes = self._workers[copy.worker], sequence.block_hashes[first : first + count]
        if count == 0:
            return
        if known := self._index.on(copy.worker, hashes[-1]):
            self._index.touch(known)
            return
        prefix = Prefix(self.new_id(), copy.worker, hashes, self.share(copy, count), origin)
        self._index.add(prefix)
        worker.fork(prefix.prefix_id, segment.cache_id, count * self._workers.block_size)
        if copy.prefix_id is not None and (before := worker.prefixes.get(copy.prefix_id)):
            self._index.shorten(before, 0)
        copy.prefix_id = prefix.prefix_id
        self._names.name(prefix.prefix_id, sequence.sequence_id, segment.start)

    def adopt(self, held: Held, known: Mapping[int, KnownTokens], lowest_name: int = 0) -> dict[int, int]:
        """See :meth:`Adoption.adopt`. Names that are given from here on come below ``lowest_name`` and those there."""
        names = (each.cache_id for several in held.values() for each in several)
        self._ids = itertools.count(min((lowest_name, *names)) - 1, -1)
        return self._adoption.adopt(held, known if self.enabled else {})

    def num_adopted(self, sequence_id: int) -> int:
        """Tokens of a sequence, from its first one on, that R-workers have of an engine before this one."""
        return sum(each.num_tokens for each in self._adoption.pieces(sequence_id))

    def forget_beyond(self, copy: Copy, num_tokens: int) -> None:
        """Forget what was kept of ``copy`` beyond its first ``num_tokens`` tokens: it is wrong."""
        prefix = None if copy.prefix_id is None else self._workers[copy.worker].prefixes.get(copy.prefix_id)
        if prefix and len(prefix.blocks) > num_tokens // self._workers.block_size:
            self._index.shorten(prefix, num_tokens // self._workers.block_size)

    def make_room(self, worker: int, num_blocks: int) -> bool:
        """Evict until ``num_blocks`` are free, or nothing is left to evict; True when they are free then."""
        missing = num_blocks - self._workers[worker].free
        if missing > 0:
            self._index.evict(worker, missing)
        return self._workers[worker].free >= num_blocks

    def reset(self) -> None:
        """Forget everything; running sequences go on."""
        for index in range(len(self._workers)):
            self._index.clear(index)

    def lose(self, worker: int) -> None:
        """``worker`` is gone with what it retained."""
        self._index.clear(worker)

    def _usable(self, sequence: Sequence) -> list[bytes]:
        return sequence.block_hashes[: (sequence.num_prefill - 1) // self._workers.block_size] if self.enabled else []

    def _num_cached(self, sequence: Sequence, usable: list[bytes]) -> int:
        """How many of the ``usable`` blocks of ``sequence`` are cached, on the R-worker that has most of them."""
        return max((hit.num_blocks for hit in self._index.longest(sequence, usable).values()), default=0)

    def is_worth(self, sequence: Sequence, num_blocks: int) -> bool:
        """Whether so many blocks, and what remains then, is better than all of ``sequence`` computed."""
        return 2 * num_blocks * self._workers.block_size >= sequence.num_prefill

    def _leaves(self, leader: Sequence, num_blocks: int) -> bool:
        """Whether others can begin with the first ``num_blocks`` blocks that ``leader`` computes."""
        return True
