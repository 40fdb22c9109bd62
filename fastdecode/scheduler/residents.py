"""Which sequences hold a cache, and on which R-workers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fastdecode.scheduler.prefix import PrefixCache
from fastdecode.scheduler.ranges import UNLIMITED, Range
from fastdecode.scheduler.sequence import Sequence, SequenceTable
from fastdecode.scheduler.worker_state import Block, Chain, Control, Workers
from fastdecode.types import Verb


class Residents:
    """Keeps blocks, scratch, prefix cache and controls in step with the sequences that come and go; decides nothing.

    ``prompts``: those whose prompt is being computed, in the order of their start. ``decoding``: the others;
    ``table`` has their progress. ``copying``: the one of which a second copy is made, and how far that has come.
    """

    def __init__(
        self,
        workers: Workers,
        prefix_cache: PrefixCache,
        scratch_tokens: int,
        max_num_seqs: int,
        most_drafts: int = 0,
        range_tokens: int = UNLIMITED,
    ) -> None:
        self.workers = workers
        self.prefix_cache = prefix_cache
        self.scratch_free = scratch_tokens
        self.prompts: dict[int, Sequence] = {}
        self.decoding: dict[int, Sequence] = {}
        self.table = SequenceTable(max_num_seqs, most_drafts, range_tokens)
        self.copying: tuple[Sequence, Range] | None = None
        self._unborn = 0

    def __len__(self) -> int:
        """Sequences that hold a cache, and siblings that will as soon as their prompt is computed."""
        return len(self.prompts) + len(self.decoding) + self._unborn

    def __contains__(self, sequence: Sequence) -> bool:
        """True when ``sequence`` holds a cache."""
        return sequence.sequence_id in self.prompts or sequence.sequence_id in self.decoding

    @property
    def all(self) -> list[Sequence]:
        """Those that hold a cache."""
        return [*self.prompts.values(), *self.decoding.values()]

    @property
    def num_copies(self) -> tuple[int, int]:
        """Sequences that hold their cache once, and twice."""
        twice = int(np.count_nonzero(self.table.copies >= 0))
        return len(self.prompts) + len(self.decoding) - twice, twice

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
        """The sequences of which something is on one R-worker, oldest first."""
        here = [
            s
            for s in self.all
            if worker in (s.worker, s.copy_worker) or (s.is_sharded and any(each.worker == worker for each in s.ranges))
        ]
        return sorted(here, key=lambda sequence: sequence.sequence_id)

    def start(self, sequence: Sequence, ranges: list[Range], hit: tuple[int, Chain] | None, copy: int = -1) -> None:
        """``sequence`` begins its prompt in ``ranges``, which have places and blocks, ``hit``'s among them; with a
        second copy on R-worker ``copy``, or none."""
        sequence.outputs_at_start = len(sequence.output_token_ids)
        self.prefix_cache.begin(sequence, ranges, hit)
        for each in ranges:
            self.take(each)
        self.workers[ranges[0].worker].num_sequences += 1
        sequence.ahead = ranges[1:]
        self.table.open(sequence, ranges[0])
        if copy >= 0:
            self._add_copy(sequence, copy, self.prefix_cache.begin_copy(sequence, hit) if hit else [])
        self.go_on(sequence)
        self.prompts[sequence.sequence_id] = sequence
        self._unborn += len(sequence.siblings)
        sequence.uses_scratch = hit is None and sequence.num_prefill <= self.scratch_free
        if sequence.uses_scratch:
            self.scratch_free -= sequence.num_prefill

    def go_on(self, sequence: Sequence) -> None:
        """Where the tail of ``sequence`` is whole, and a range is ahead, that is its tail from now on."""
        while sequence.ahead and sequence.num_cached - sequence.base == self.table.range_tokens:
            self.workers[sequence.worker].num_sequences -= 1
            sequence.closed.append(sequence.tail)
            self.table.put(sequence, sequence.ahead.pop(0))
            if sequence.worker >= 0:
                self.workers[sequence.worker].num_sequences += 1

    def extend(self, sequence: Sequence, worker: int) -> None:
        """``sequence``, whose tail is whole, gets a new one on ``worker``."""
        sequence.ahead.append(Range(self.prefix_cache.new_id(), worker, sequence.num_cached))
        self.workers[worker].num_ranges += 1
        self.go_on(sequence)

    def grow(self, rows: np.ndarray, num_blocks: np.ndarray | int = 1) -> None:
        """Each of these rows of the table takes ``num_blocks`` more; fewer than none give some back."""
        self.table.num_blocks[rows] += num_blocks
        for worker, count in enumerate(self.table.count_held(rows, num_blocks, len(self.workers)).tolist()):
            self.workers[worker].free -= count

    def truncate(self, sequence: Sequence) -> None:
        """The R-worker holds more tokens of ``sequence``, which decodes, than are cached: it is to drop the others."""
        tail = sequence.tail
        for worker in sequence.holders or [tail.worker]:
            self.workers[worker].controls.append((int(Verb.TRUNCATE), tail.cache_id, 0, tail.num_tokens))
        surplus = tail.num_blocks - self.workers.blocks_for(tail.num_tokens)
        self.grow(np.array([sequence.row]), -surplus)

    def send_away(self, sequence: Sequence, job_id: int) -> None:
        """Prefill workers compute the prompt of ``sequence``, just started, as job ``job_id``, on its home."""
        if (copy := sequence.copy_worker) >= 0:
            self.drop_holder(sequence, copy)
        self.leave_scratch(sequence)
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
        self.leave_scratch(sequence)
        self.prefix_cache.stop_computing(sequence)
        self.prefix_cache.retain(sequence)
        self.table.decode(sequence)

    def fork_siblings(self, parent: Sequence) -> None:
        """The siblings of ``parent``, whose prompt has just been cached, start from a shared copy and decode."""
        if not parent.siblings:
            return
        for sibling in parent.siblings:
            sibling.num_prefill = parent.num_prefill
            sibling.block_hashes = list(parent.block_hashes)
            sibling.closed = [self._fork(each, self.prefix_cache.new_id()) for each in parent.closed]
            tail = parent.tail
            self.table.open(sibling, self._fork(tail, sibling.sequence_id))
            self.workers[tail.worker].num_sequences += 1
            if copy := parent.copy:
                copied = self._fork(copy, sibling.sequence_id)
                self._put_copy(sibling, copied.worker, copied.shared)
            self.decoding[sibling.sequence_id] = sibling
            self.table.decode(sibling)
        has_partial = parent.tail.num_tokens % self.workers.block_size > 0
        self.table.num_blocks[parent.row] -= has_partial * len(parent.siblings)
        self._unborn -= len(parent.siblings)
        parent.siblings = ()

    def _fork(self, source: Range, cache_id: int) -> Range:
        """A copy of ``source``: full blocks are shared, and for a partial one there is room already."""
        num_full, rest = divmod(source.num_tokens, self.workers.block_size)
        worker, shared = self.workers[source.worker], self.prefix_cache.share(source, num_full)
        worker.hold(shared)
        worker.num_ranges += 1
        worker.controls.append((int(Verb.FORK), cache_id, source.cache_id, source.num_tokens))
        return Range(cache_id, source.worker, source.start, source.num_tokens, num_full + (rest > 0), shared)

    def forget_unused(self, sequence: Sequence) -> None:
        """Tokens of ``sequence`` that are cached, but not its own: drafts accepted beyond its end."""
        self.table.num_cached[sequence.row] = min(sequence.num_cached, sequence.num_tokens)

    def leave(self, sequence: Sequence, keep: bool) -> None:
        """``sequence`` gives up its cache; its full blocks are retained if ``keep`` and prefix caching say so."""
        self.take_out(sequence)
        if keep:
            self.prefix_cache.retain(sequence)
        if (copy := sequence.copy_worker) >= 0:
            self.drop_holder(sequence, copy)
        for each in sequence.ranges:
            self.give_up(each, each.num_tokens > 0 or sequence.job_id > 0)
        self.forget_cache(sequence)

    def move(self, sequence: Sequence, cache_id: int, target: int, num_blocks: int) -> None:
        """The range ``cache_id`` of ``sequence``, which decodes, is on ``target`` now, in blocks of its own."""
        moved = next(each for each in sequence.ranges if each.cache_id == cache_id)
        self.give_up(moved, True)
        copy = Range(cache_id, target, moved.start, moved.num_tokens, num_blocks)
        self.take(copy)
        self.replace(sequence, copy)

    def replace(self, sequence: Sequence, new: Range) -> None:
        """``new`` takes the place of the range of ``sequence`` that starts where it does."""
        if new.start == sequence.base:
            if sequence.worker >= 0:
                self.workers[sequence.worker].num_sequences -= 1
            self.workers[new.worker].num_sequences += 1
            self.table.put(sequence, new)
            return
        for group in (sequence.closed, sequence.ahead):
            group[:] = [new if each.start == new.start else each for each in group]
        self.table.put(sequence, sequence.tail)

    def begin_copy(self, sequence: Sequence, worker: int) -> None:
        """``sequence``, which decodes, is copied to ``worker`` from now on, piece by piece."""
        held = Range(sequence.cache_id, worker, 0, 0, sequence.num_blocks)
        self.take(held)
        self.copying = sequence, held

    def extend_copy(self, sequence: Sequence, held: Range, num_tokens: int) -> None:
        """So many more tokens of ``sequence`` were copied; once all are, that is its second copy."""
        held.num_tokens += num_tokens
        if held.num_tokens < sequence.num_cached:
            return
        self.copying = None
        if (before := sequence.copy_worker) >= 0:
            self.drop_holder(sequence, before)
        self._put_copy(sequence, held.worker, [])

    def grow_copy(self, sequence: Sequence, held: Range) -> bool:
        """Take the blocks that ``sequence`` has got since the copy began; False where there is no room for them."""
        worker, more = self.workers[held.worker], sequence.num_blocks - held.num_blocks
        if more > 0 and (worker.available < more + worker.num_sequences or worker.is_draining):
            return False
        self.prefix_cache.make_room(held.worker, more)
        worker.free -= more
        held.num_blocks += more
        return True

    def drop_copying(self) -> None:
        """What was copied so far of a sequence is given up."""
        if self.copying:
            _, held = self.copying
            self.give_up(held, held.num_tokens > 0)
            self.copying = None

    def swap_home(self, sequence: Sequence) -> None:
        """The R-worker with the second copy of ``sequence`` is its home from now on, and its home has the second."""
        copy, home, attends_home = sequence.copy, sequence.tail, not self.table.on_copy[sequence.row]
        if copy is None:
            raise ValueError(f"sequence {sequence.sequence_id} has one copy")
        self.table.put(sequence, copy)
        self.table.copies[sequence.row] = home.worker
        sequence.copy_shared, sequence.copy_chain_id = home.shared, home.chain_id
        self.table.on_copy[sequence.row] = attends_home

    def drop_holder(self, sequence: Sequence, worker: int) -> None:
        """``sequence``, which has two copies, keeps the one that is not on ``worker``: that is its home from now on."""
        copy = sequence.copy
        if copy is None:
            raise ValueError(f"sequence {sequence.sequence_id} has one copy")
        gone, kept = (copy, sequence.tail) if worker == copy.worker else (sequence.tail, copy)
        self.give_up(gone, gone.num_tokens > 0)
        self.workers[worker].num_sequences -= 1
        self.table.copies[sequence.row], self.table.on_copy[sequence.row] = -1, False
        self.table.put(sequence, kept)
        sequence.copy_shared, sequence.copy_chain_id = [], None

    def _add_copy(self, sequence: Sequence, worker: int, shared: list[Block]) -> None:
        self.take(Range(sequence.cache_id, worker, 0, sequence.num_cached, sequence.num_blocks, shared))
        self._put_copy(sequence, worker, shared)

    def _put_copy(self, sequence: Sequence, worker: int, shared: list[Block]) -> None:
        self.workers[worker].num_sequences += 1
        self.table.copies[sequence.row], sequence.copy_shared, sequence.copy_chain_id = worker, shared, None

    def place(self, sequence: Sequence, lost: Range, worker: int) -> None:
        """``lost``, a range of ``sequence``, is to be computed again on ``worker``."""
        new = replace(lost, worker=worker)
        self.take(new)
        self.replace(sequence, new)

    def take(self, held: Range) -> None:
        """``held`` is on its R-worker now, which counts its blocks."""
        worker = self.workers[held.worker]
        self.prefix_cache.make_room(held.worker, held.num_own_blocks)
        worker.free -= held.num_own_blocks
        worker.num_ranges += 1

    def give_up(self, held: Range, is_there: bool) -> None:
        """Its blocks are free again; its R-worker is told where something ``is_there``."""
        if held.worker < 0:
            return
        worker = self.workers[held.worker]
        worker.free += held.num_own_blocks
        worker.drop(held.shared)
        worker.num_ranges -= 1
        if is_there:
            worker.controls.append((int(Verb.RELEASE), held.cache_id, 0, 0))

    def _tell(self, sequence: Sequence, verb: Verb) -> None:
        controls = self.workers[sequence.worker].controls
        controls.append((int(verb), sequence.sequence_id, sequence.job_id, sequence.num_prefill))

    def take_out(self, sequence: Sequence) -> None:
        """``sequence`` runs no more; what it holds is still to be given up."""
        if sequence.worker >= 0:
            self.workers[sequence.worker].num_sequences -= 1
        self._unborn -= len(sequence.siblings)
        if self.prompts.pop(sequence.sequence_id, None):
            self.leave_scratch(sequence)
            self.prefix_cache.stop_computing(sequence)
        else:
            del self.decoding[sequence.sequence_id]

    def forget_cache(self, sequence: Sequence) -> None:
        if self.copying and self.copying[0] is sequence:
            self.drop_copying()
        self.table.close(sequence)
        sequence.shared, sequence.chain_id, sequence.job_id = [], None, 0
        sequence.closed, sequence.ahead = [], []

    def leave_scratch(self, sequence: Sequence) -> None:
        if sequence.uses_scratch:
            sequence.uses_scratch = False
            self.scratch_free += sequence.num_prefill
