"""Where sequences are: waiting, oldest first, or resident, holding a cache on an R-worker."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

import numpy as np

from fastdecode.scheduler.prefix import PrefixCache
from fastdecode.scheduler.sequence import Sequence, SequenceTable
from fastdecode.scheduler.worker_state import Chain, Control, Workers
from fastdecode.types import Verb


class WaitingQueue:
    """Ordered by age. One whose prefix is being computed right now steps aside and follows its leader."""

    def __init__(self, prefix_cache: PrefixCache) -> None:
        self._prefix_cache = prefix_cache
        self._waiting: list[Sequence] = []
        self._following: dict[int, list[Sequence]] = {}

    def __len__(self) -> int:
        """Those who wait, followers included."""
        return len(self._waiting) + sum(map(len, self._following.values()))

    def __iter__(self) -> Iterator[Sequence]:
        """Oldest first, without followers."""
        return iter(self._waiting)

    @property
    def all(self) -> list[Sequence]:
        """Those who wait, followers included, in no order."""
        return [*self._waiting, *(follower for group in self._following.values() for follower in group)]

    def push(self, sequence: Sequence) -> None:
        """Queue ``sequence`` to compute all tokens it has."""
        sequence.num_prefill = sequence.num_tokens
        self._prefix_cache.arrive(sequence)
        self._insert(sequence)

    def head(self) -> Sequence | None:
        """The oldest that need not wait for another's prefix."""
        while self._waiting:
            leader = self._prefix_cache.leader(self._waiting[0])
            if leader is None:
                return self._waiting[0]
            self._following.setdefault(leader.sequence_id, []).append(self._waiting.pop(0))
        return None

    def pop(self) -> Sequence:
        """Take the head out."""
        return self._waiting.pop(0)

    def release_followers(self, leader: Sequence) -> None:
        """``leader`` has computed its prompt, or will not."""
        for sequence in self._following.pop(leader.sequence_id, []):
            self._insert(sequence)

    def discard(self, sequence: Sequence) -> None:
        """Take ``sequence`` out, wherever it waits, if it does."""
        for group in (self._waiting, *self._following.values()):
            if sequence in group:
                group.remove(sequence)

    def _insert(self, sequence: Sequence) -> None:
        bisect.insort(self._waiting, sequence, key=lambda other: other.sequence_id)


class Residents:
    """Keeps blocks, scratch, prefix cache and controls in step with the sequences that come and go; decides nothing.

    ``prompts``: those whose prompt is being computed, in the order of their start. ``decoding``: the others;
    ``table`` has their progress.
    """

    def __init__(
        self, workers: Workers, prefix_cache: PrefixCache, scratch_tokens: int, max_num_seqs: int, most_drafts: int = 0
    ) -> None:
        self.workers = workers
        self.prefix_cache = prefix_cache
        self.scratch_free = scratch_tokens
        self.prompts: dict[int, Sequence] = {}
        self.decoding: dict[int, Sequence] = {}
        self.table = SequenceTable(max_num_seqs, most_drafts)
        self._unborn = 0

    def __len__(self) -> int:
        """Sequences that hold a cache, and siblings that will as soon as their prompt is computed."""
        return len(self.prompts) + len(self.decoding) + self._unborn

    def __contains__(self, sequence: Sequence) -> bool:
        """True when ``sequence`` holds a cache."""
        return sequence.sequence_id in self.prompts or sequence.sequence_id in self.decoding

    @property
    def has_controls(self) -> bool:
        """True while some R-worker has yet to be told something."""
        return any(worker.controls for worker in self.workers)

    def take_controls(self) -> tuple[tuple[Control, ...], ...]:
        """What the R-workers have to be told, handed over once."""
        controls = tuple(tuple(worker.controls) for worker in self.workers)
        for worker in self.workers:
            worker.controls.clear()
        return controls

    def put_back(self, controls: tuple[tuple[Control, ...], ...]) -> None:
        """The R-workers heard none of ``controls``: they go before any that came since."""
        for worker, verbs in zip(self.workers, controls, strict=True):
            worker.controls[:0] = verbs

    def on(self, worker: int) -> list[Sequence]:
        """The sequences of one R-worker, oldest first."""
        here = [s for group in (self.prompts, self.decoding) for s in group.values() if s.worker == worker]
        return sorted(here, key=lambda sequence: sequence.sequence_id)

    def start(self, sequence: Sequence, worker: int, hit: tuple[int, Chain] | None, num_blocks: int) -> None:
        """``sequence`` begins its prompt on ``worker``, with ``num_blocks`` blocks, ``hit``'s among them."""
        num_cached = hit[0] * self.workers.block_size if hit else 0
        self.table.open(sequence, worker, num_cached, num_blocks)
        sequence.outputs_at_start = len(sequence.output_token_ids)
        self.prefix_cache.begin(sequence, hit)
        self.prefix_cache.make_room(worker, sequence.num_own_blocks)
        self._settle(sequence, self.prompts)
        self._unborn += len(sequence.siblings)
        sequence.uses_scratch = hit is None and sequence.num_prefill <= self.scratch_free
        if sequence.uses_scratch:
            self.scratch_free -= sequence.num_prefill

    def grow(self, rows: np.ndarray, num_blocks: np.ndarray | int = 1) -> None:
        """Each of these rows of the table takes ``num_blocks`` more; fewer than none give some back."""
        self.table.num_blocks[rows] += num_blocks
        weights = np.broadcast_to(num_blocks, rows.shape)
        for worker, count in enumerate(np.bincount(self.table.workers[rows], weights).tolist()):
            self.workers[worker].free -= int(count)

    def truncate(self, sequence: Sequence) -> None:
        """The R-worker holds more tokens of ``sequence``, which decodes, than are cached: it is to drop the others."""
        verb = (int(Verb.TRUNCATE), sequence.sequence_id, 0, sequence.num_cached)
        self.workers[sequence.worker].controls.append(verb)
        surplus = sequence.num_blocks - self.workers.blocks_for(sequence.num_cached)
        self.grow(np.array([sequence.row]), -surplus)

    def send_away(self, sequence: Sequence, job_id: int) -> None:
        """Prefill workers compute the prompt of ``sequence``, which has just started, as job ``job_id``."""
        self._leave_scratch(sequence)
        sequence.job_id = job_id
        self._tell(sequence, Verb.RESERVE)

    def arrive(self, sequence: Sequence) -> None:
        """The R-worker has all keys and values of ``sequence``'s prompt, which prefill workers computed."""
        self._tell(sequence, Verb.COMMIT)

    def finish_prompt(self, sequence: Sequence) -> None:
        """All of ``sequence``'s prompt is cached: it decodes from here on."""
        sequence.job_id = 0
        del self.prompts[sequence.sequence_id]
        self.decoding[sequence.sequence_id] = sequence
        self._leave_scratch(sequence)
        self.prefix_cache.stop_computing(sequence)
        self.prefix_cache.retain(sequence)
        self.table.decode(sequence)

    def fork_siblings(self, parent: Sequence) -> None:
        """The siblings of ``parent``, whose prompt has just been cached, start from a shared copy and decode."""
        if not parent.siblings:
            return
        num_tokens, worker = parent.num_prefill, self.workers[parent.worker]
        num_full, has_partial = num_tokens // self.workers.block_size, num_tokens % self.workers.block_size > 0
        for sibling in parent.siblings:
            self.table.open(sibling, parent.worker, num_tokens, num_full + has_partial)
            sibling.num_prefill = num_tokens
            sibling.shared = self.prefix_cache.share(parent, num_full)
            sibling.block_hashes = list(parent.block_hashes)
            worker.hold(sibling.shared)
            worker.controls.append((int(Verb.FORK), sibling.sequence_id, parent.sequence_id, num_tokens))
            worker.num_sequences += 1
            self.decoding[sibling.sequence_id] = sibling
            self.table.decode(sibling)
        self.table.num_blocks[parent.row] -= has_partial * len(parent.siblings)
        self._unborn -= len(parent.siblings)
        parent.siblings = ()

    def forget_unused(self, sequence: Sequence) -> None:
        """Tokens of ``sequence`` that are cached, but not its own: drafts accepted beyond its end."""
        self.table.num_cached[sequence.row] = min(sequence.num_cached, sequence.num_tokens)

    def leave(self, sequence: Sequence, keep: bool) -> None:
        """``sequence`` gives up its cache; its full blocks are retained if ``keep`` and prefix caching say so."""
        self._take_out(sequence)
        if keep:
            self.prefix_cache.retain(sequence)
        self._give_up_blocks(sequence)
        self._forget_cache(sequence)

    def move(self, sequence: Sequence, target: int, num_blocks: int) -> None:
        """The cache of ``sequence``, which decodes, is on ``target`` now, in blocks of its own."""
        self._take_out(sequence)
        self._give_up_blocks(sequence)
        num_cached = sequence.num_cached
        self._forget_cache(sequence)
        self.table.open(sequence, target, num_cached, num_blocks)
        self.table.decode(sequence)
        self._settle(sequence, self.decoding)

    def lose(self, worker: int) -> list[Sequence]:
        """``worker`` is gone; returns the sequences that it held, oldest first."""
        lost = self.on(worker)
        for sequence in lost:
            self._take_out(sequence)
            self.workers[worker].drop(sequence.shared)
            self._forget_cache(sequence)
        self.prefix_cache.lose(worker)
        self.workers.lose(worker)
        return lost

    def _settle(self, sequence: Sequence, group: dict[int, Sequence]) -> None:
        """``sequence`` is on its R-worker now, which counts its blocks."""
        worker = self.workers[sequence.worker]
        worker.free -= sequence.num_own_blocks
        worker.num_sequences += 1
        group[sequence.sequence_id] = sequence

    def _give_up_blocks(self, sequence: Sequence) -> None:
        worker = self.workers[sequence.worker]
        worker.free += sequence.num_own_blocks
        worker.drop(sequence.shared)
        if sequence.num_cached or sequence.job_id:
            worker.controls.append((int(Verb.RELEASE), sequence.sequence_id, 0, 0))

    def _tell(self, sequence: Sequence, verb: Verb) -> None:
        controls = self.workers[sequence.worker].controls
        controls.append((int(verb), sequence.sequence_id, sequence.job_id, sequence.num_prefill))

    def _take_out(self, sequence: Sequence) -> None:
        """``sequence`` runs no more; what it holds is still to be given up."""
        self.workers[sequence.worker].num_sequences -= 1
        self._unborn -= len(sequence.siblings)
        if self.prompts.pop(sequence.sequence_id, None):
            self._leave_scratch(sequence)
            self.prefix_cache.stop_computing(sequence)
        else:
            del self.decoding[sequence.sequence_id]

    def _forget_cache(self, sequence: Sequence) -> None:
        self.table.close(sequence)
        sequence.shared, sequence.chain_id, sequence.job_id = [], None, 0

    def _leave_scratch(self, sequence: Sequence) -> None:
        if sequence.uses_scratch:
            sequence.uses_scratch = False
            self.scratch_free += sequence.num_prefill
