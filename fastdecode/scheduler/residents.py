"""The sequences that hold a cache, and what the R-workers have yet to be told of them."""

from __future__ import annotations

import numpy as np

from fastdecode.scheduler.blocks import BlockLedger
from fastdecode.scheduler.decode_table import DecodeTable
from fastdecode.scheduler.prefix_cache import PrefixCache
from fastdecode.scheduler.prefix_index import Chain, Control
from fastdecode.scheduler.sequence import Sequence
from fastdecode.types import Verb


class Residents:
    """Keeps blocks, scratch, prefix cache and controls in step with who comes and goes; decides nothing.

    ``prompts``: those whose prompt is being computed, in the order of their start. ``decoding``: the others;
    ``table`` has their progress.
    """

    def __init__(self, ledger: BlockLedger, prefix_cache: PrefixCache, scratch_tokens: int, max_num_seqs: int) -> None:
        self.ledger = ledger
        self.prefix_cache = prefix_cache
        self.scratch_free = scratch_tokens
        self.prompts: dict[int, Sequence] = {}
        self.decoding: dict[int, Sequence] = {}
        self.table = DecodeTable(max_num_seqs)
        self._unborn = 0
        self._num_on = [0] * len(ledger.num_blocks)
        self._controls: list[list[Control]] = [[] for _ in ledger.num_blocks]

    def __len__(self) -> int:
        """Sequences that hold a cache, and siblings that will as soon as their prompt is computed."""
        return len(self.prompts) + len(self.decoding) + self._unborn

    def __contains__(self, sequence: Sequence) -> bool:
        """True when ``sequence`` holds a cache."""
        return sequence.sequence_id in self.prompts or sequence.sequence_id in self.decoding

    @property
    def has_controls(self) -> bool:
        """True while some R-worker has yet to be told something."""
        return any(self._controls)

    def take_controls(self) -> tuple[tuple[Control, ...], ...]:
        """What the R-workers have to be told, handed over once."""
        controls = tuple(tuple(verbs) for verbs in self._controls)
        self._controls = [[] for _ in controls]
        return controls

    def put_back(self, controls: tuple[tuple[Control, ...], ...]) -> None:
        """The R-workers heard none of ``controls``: they go before any that came since."""
        self._controls = [[*mine, *later] for mine, later in zip(controls, self._controls, strict=True)]

    def kv_loads(self) -> np.ndarray:
        """Cached tokens, with those that prompts in progress will have: float64 [num_workers]."""
        loads = self.table.kv_loads(len(self._controls))
        for sequence in self.prompts.values():
            loads[sequence.worker] += sequence.num_prefill
        return loads

    def num_on(self, worker: int) -> int:
        """Sequences of one R-worker, siblings to come not counted."""
        return self._num_on[worker]

    def counts(self) -> np.ndarray:
        """The same for every R-worker: int64 [num_workers]."""
        return np.array(self._num_on)

    def on(self, worker: int) -> list[Sequence]:
        """The sequences of one R-worker, oldest first."""
        here = [s for group in (self.prompts, self.decoding) for s in group.values() if s.worker == worker]
        return sorted(here, key=lambda sequence: sequence.sequence_id)

    def start(self, sequence: Sequence, worker: int, hit: tuple[int, Chain] | None, num_blocks: int) -> None:
        """``sequence`` begins its prompt on ``worker``, with ``num_blocks`` blocks, ``hit``'s among them."""
        sequence.worker, sequence.num_blocks = worker, num_blocks
        sequence.outputs_at_start = len(sequence.output_token_ids)
        self._controls[worker] += self.prefix_cache.begin(sequence, hit)
        self.make_room(worker, sequence.num_own_blocks)
        self.ledger.take(worker, sequence.num_own_blocks)
        self.prompts[sequence.sequence_id] = sequence
        self._num_on[worker] += 1
        self._unborn += len(sequence.siblings)
        sequence.uses_scratch = hit is None and sequence.num_prefill <= self.scratch_free
        if sequence.uses_scratch:
            self.scratch_free -= sequence.num_prefill

    def make_room(self, worker: int, num_blocks: int) -> bool:
        """Evict what the prefix cache can spare; True when ``num_blocks`` are free then."""
        self._controls[worker] += self.prefix_cache.make_room(worker, num_blocks)
        return self.ledger.free[worker] >= num_blocks

    def grow(self, rows: np.ndarray) -> None:
        """Each of these rows of the table takes one more block."""
        self.table.num_blocks[rows] += 1
        for worker, count in enumerate(np.bincount(self.table.chunks["worker"][rows]).tolist()):
            self.ledger.take(worker, count)

    def finish_prompt(self, sequence: Sequence) -> None:
        """All of ``sequence``'s prompt is cached: it decodes from here on."""
        del self.prompts[sequence.sequence_id]
        self.decoding[sequence.sequence_id] = sequence
        self._leave_scratch(sequence)
        self.prefix_cache.stop_computing(sequence)
        self._controls[sequence.worker] += self.prefix_cache.retain(sequence)
        self.table.add(sequence)

    def fork_siblings(self, parent: Sequence) -> None:
        """The siblings of ``parent``, whose prompt has just been cached, start from a shared copy and decode."""
        num_tokens = parent.num_prefill
        num_full, has_partial = num_tokens // self.ledger.block_size, num_tokens % self.ledger.block_size > 0
        for sibling in parent.siblings:
            sibling.worker, sibling.num_cached, sibling.num_prefill = parent.worker, num_tokens, num_tokens
            sibling.num_blocks = num_full + has_partial
            sibling.shared = self.prefix_cache.share(parent, num_full)
            sibling.block_hashes = list(parent.block_hashes)
            self.ledger.hold(parent.worker, sibling.shared)
            fork = (int(Verb.FORK), sibling.sequence_id, parent.sequence_id, num_tokens)
            self._controls[parent.worker].append(fork)
            self.decoding[sibling.sequence_id] = sibling
            self.table.add(sibling)
            self._num_on[parent.worker] += 1
        parent.num_blocks -= has_partial * len(parent.siblings)
        self._unborn -= len(parent.siblings)
        parent.siblings = ()

    def leave(self, sequence: Sequence, keep: bool) -> None:
        """``sequence`` gives up its cache; its full blocks are retained if ``keep`` and prefix caching say so."""
        self._take_out(sequence)
        if keep:
            self._controls[sequence.worker] += self.prefix_cache.retain(sequence)
        self._give_up_blocks(sequence)
        _forget_cache(sequence)

    def move(self, sequence: Sequence, target: int, num_blocks: int) -> None:
        """The cache of ``sequence``, which decodes, is on ``target`` now, in blocks of its own."""
        self._take_out(sequence)
        self._give_up_blocks(sequence)
        num_cached = sequence.num_cached
        _forget_cache(sequence)
        sequence.worker, sequence.num_cached, sequence.num_blocks = target, num_cached, num_blocks
        self.ledger.take(target, sequence.num_blocks)
        self.decoding[sequence.sequence_id] = sequence
        self.table.add(sequence)
        self._num_on[target] += 1

    def join(self, num_blocks: int) -> None:
        """One more R-worker."""
        self.ledger.join(num_blocks)
        self.prefix_cache.join()
        self._num_on.append(0)
        self._controls.append([])

    def lose(self, worker: int) -> list[Sequence]:
        """``worker`` is gone; returns the sequences that it held, oldest first."""
        lost = self.on(worker)
        for sequence in lost:
            self._take_out(sequence)
            self.ledger.drop(worker, sequence.shared)
            _forget_cache(sequence)
        self.prefix_cache.lose(worker)
        self.ledger.lose(worker)
        self._controls[worker].clear()
        return lost

    def _give_up_blocks(self, sequence: Sequence) -> None:
        self.ledger.give_back(sequence.worker, sequence.num_own_blocks)
        self.ledger.drop(sequence.worker, sequence.shared)
        if sequence.num_cached:
            self._controls[sequence.worker].append((int(Verb.RELEASE), sequence.sequence_id, 0, 0))

    def _take_out(self, sequence: Sequence) -> None:
        """``sequence`` runs no more; what it holds is still to be given up."""
        self._num_on[sequence.worker] -= 1
        self._unborn -= len(sequence.siblings)
        if self.prompts.pop(sequence.sequence_id, None):
            self._leave_scratch(sequence)
            self.prefix_cache.stop_computing(sequence)
        else:
            del self.decoding[sequence.sequence_id]
            self.table.remove(sequence)

    def reset_prefix_cache(self) -> None:
        """Forget what is retained."""
        for worker, control in self.prefix_cache.reset():
            self._controls[worker].append(control)

    def _leave_scratch(self, sequence: Sequence) -> None:
        if sequence.uses_scratch:
            sequence.uses_scratch = False
            self.scratch_free += sequence.num_prefill


def _forget_cache(sequence: Sequence) -> None:
    sequence.worker, sequence.num_cached, sequence.num_blocks = -1, 0, 0
    sequence.shared, sequence.chain_id = [], None
