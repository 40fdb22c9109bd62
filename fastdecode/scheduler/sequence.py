"""One sequence as the scheduler knows it, and the table of those that hold a cache."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from fastdecode.scheduler.ranges import UNLIMITED, Range
from fastdecode.scheduler.worker_state import Block
from fastdecode.step import CHUNK, NO_READS, READ, MiniBatch


@dataclass(eq=False)
class Sequence:
    """``max_tokens`` bounds the output; ``num_cached`` tokens of prompt + output are in an R-worker's cache.

    ``sequence_id`` grows with arrival: a lower one is older. ``siblings`` share the prompt (``SamplingParams.n`` > 1):
    this sequence computes it, and they are forked from it once it is cached. ``num_prefill`` tokens have to be computed
    before it can decode: its prompt, and after a preemption also its output so far.

    It holds ``num_blocks`` blocks, of which the first are ``shared`` with the prefix cache or with siblings. While it
    holds a cache, its progress is in ``row`` of ``table``. ``outputs_at_start``: output tokens that it had when it last
    began, None before its first start. ``may_stop``: its output may end before ``max_tokens``. ``job_id``: under which
    prefill workers compute its prompt; 0: the S-worker does, or has.

    A long one lies in several :class:`Range`: it appends to its tail, to which ``worker``, ``num_blocks``, ``shared``
    and ``chain_id`` belong. Those before it are ``closed``: whole, and only read. Those ``ahead`` have blocks for the
    rest of the prompt, or were there when one before them was lost.

    One with a second copy (``kv_replicas``) has all tokens in as many blocks on R-worker ``copy_worker`` too, of which
    the first are ``copy_shared`` and retained as ``copy_chain_id``; ``worker`` is its home.
    """

    sequence_id: int
    prompt_token_ids: list[int]
    max_tokens: int
    siblings: tuple[Sequence, ...] = ()
    output_token_ids: list[int] = field(default_factory=list)
    worker: int = -1
    num_prefill: int = 0
    uses_scratch: bool = False
    job_id: int = 0
    shared: list[Block] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    chain_id: int | None = None
    outputs_at_start: int | None = None
    may_stop: bool = False
    was_preempted: bool = False
    table: SequenceTable | None = field(default=None, repr=False)
    row: int = -1
    closed: list[Range] = field(default_factory=list)
    ahead: list[Range] = field(default_factory=list)
    copy_shared: list[Block] = field(default_factory=list)
    copy_chain_id: int | None = None

    def append(self, token_id: int) -> None:
        """One more output token."""
        self.output_token_ids.append(token_id)
        if self.table is not None:
            self.table.last_tokens[self.row] = token_id

    @property
    def num_cached(self) -> int:
        """Tokens in the cache."""
        return 0 if self.table is None else int(self.table.num_cached[self.row])

    @property
    def num_blocks(self) -> int:
        """Blocks held."""
        return 0 if self.table is None else int(self.table.num_blocks[self.row])

    @property
    def base(self) -> int:
        """Tokens before its tail."""
        return 0 if self.table is None else int(self.table.bases[self.row])

    @property
    def cache_id(self) -> int:
        """What its R-worker calls its tail."""
        return self.sequence_id if self.table is None else int(self.table.cache_ids[self.row])

    @property
    def left_in_tail(self) -> int:
        """Tokens that its tail still takes."""
        return (self.table.range_tokens if self.table else UNLIMITED) - (self.num_cached - self.base)

    @property
    def tail(self) -> Range:
        """The range that it appends to, as it is now."""
        num_tokens = self.num_cached - self.base
        return Range(self.cache_id, self.worker, self.base, num_tokens, self.num_blocks, self.shared, self.chain_id)

    @property
    def copy_worker(self) -> int:
        """The R-worker that has its second copy; -1: none."""
        return -1 if self.table is None else int(self.table.copies[self.row])

    @property
    def copy(self) -> Range | None:
        """Its second copy, as it is now."""
        if (worker := self.copy_worker) < 0:
            return None
        return Range(self.cache_id, worker, 0, self.num_cached, self.num_blocks, self.copy_shared, self.copy_chain_id)

    @property
    def holders(self) -> list[int]:
        """The R-workers that have all of it; one of several ranges has none."""
        return [] if self.is_sharded else [each for each in (self.worker, self.copy_worker) if each >= 0]

    @property
    def ranges(self) -> list[Range]:
        """All of them, in order, as they are now."""
        return [*self.closed, self.tail, *self.ahead]

    @property
    def is_sharded(self) -> bool:
        """True where it has more than one range."""
        return bool(self.closed or self.ahead)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def max_cached(self) -> int:
        """The most tokens this sequence can ever hold in the cache; its last output token is never cached."""
        return len(self.prompt_token_ids) + self.max_tokens - 1

    @property
    def num_own_blocks(self) -> int:
        """Blocks that no other sequence can hold."""
        return self.num_blocks - len(self.shared)

    @property
    def attends_in_prompt(self) -> bool:
        """True where its prompt attends on its R-worker."""
        return not (self.uses_scratch or self.job_id)

    @property
    def in_prompt(self) -> bool:
        """True while tokens remain to be computed before it can decode."""
        return self.num_cached < self.num_prefill

    def tokens(self, start: int, count: int) -> list[int]:
        """``count`` tokens of prompt + output from position ``start``."""
        return text_tokens(self.prompt_token_ids, self.output_token_ids, start, count)


def text_tokens(prompt: list[int], output: list[int], start: int, count: int) -> list[int]:
    """``count`` tokens of ``prompt`` and ``output``, one after the other, from position ``start``."""
    if start >= len(prompt):
        return output[start - len(prompt) : start - len(prompt) + count]
    head = prompt[start : start + count]
    return head + output[: count - len(head)]


class SequenceTable:
    """Progress of the sequences that hold a cache, a row each: planning thousands of decodes takes a few arrays.

    ``chunks``: CHUNK [most rows], the next decode of each; ``workers``, ``num_cached``, ``bases``, ``cache_ids`` and
    ``copies`` are columns of it: the R-worker of the tail, and that of the second copy. ``on_copy``: bool [most rows],
    whether the second copy's attends. Ranges end at multiples of ``range_tokens``.
    ``prompt_lens``, ``max_tokens``, ``num_blocks`` and ``last_tokens``: int64 [most rows]; a sequence writes its last
    token there itself, since looking it up in thousands of lists takes longer than all the rest. ``rows``: int64 [n],
    those that decode, as of the last :meth:`refresh` ordered by R-worker and longest context first. ``drafts``: int64
    [most rows, most_drafts], draft tokens of each, of which ``num_drafts`` count. ``tried`` and ``kept``: float64, how
    many were tested and accepted, the last ones counting most.
    """

    def __init__(self, most_rows: int, most_drafts: int = 0, range_tokens: int = UNLIMITED) -> None:
        self.range_tokens = range_tokens
        self.chunks = np.zeros(most_rows, CHUNK)
        self.workers, self.num_cached = self.chunks["worker"], self.chunks["context_len"]
        self.bases, self.cache_ids, self.copies = (self.chunks[name] for name in ("base", "cache_id", "copy"))
        self.copies[:], self.on_copy = -1, np.zeros(most_rows, bool)
        self.prompt_lens, self.max_tokens, self.num_blocks, self.last_tokens = np.zeros((4, most_rows), np.int64)
        self.drafts, self.num_drafts = np.zeros((most_rows, most_drafts), np.int64), np.zeros(most_rows, np.int64)
        self.tried, self.kept = np.zeros((2, most_rows))
        self.rows = np.zeros(0, np.int64)
        self._free = list(range(most_rows))
        self._added: dict[int, None] = {}
        self._closed = np.zeros(most_rows, bool)
        self._reads: dict[int, np.ndarray] = {}

    def open(self, sequence: Sequence, tail: Range) -> None:
        """``sequence`` has a row, and appends to ``tail``, from now on."""
        row = self._free.pop()
        self.chunks[row] = (sequence.sequence_id, -1, 0, 1, True, True, True, True, False, 0, 0, -1)
        self.on_copy[row] = False
        self.prompt_lens[row], self.max_tokens[row] = len(sequence.prompt_token_ids), sequence.max_tokens
        self.num_drafts[row], self.tried[row], self.kept[row] = 0, 0.0, 0.0
        self.last_tokens[row] = sequence.output_token_ids[-1] if len(sequence.output_token_ids) else 0
        sequence.table, sequence.row = self, row
        self.put(sequence, tail)

    def put(self, sequence: Sequence, tail: Range) -> None:
        """``sequence`` appends to ``tail``, and reads its closed ranges, from now on."""
        row = sequence.row
        self.workers[row], self.bases[row], self.cache_ids[row] = tail.worker, tail.start, tail.cache_id
        self.num_cached[row], self.num_blocks[row] = tail.start + tail.num_tokens, tail.num_blocks
        sequence.worker, sequence.shared, sequence.chain_id = tail.worker, tail.shared, tail.chain_id
        self._reads.pop(row, None)
        if sequence.closed:
            self._reads[row] = np.array([(0, each.worker, each.cache_id, each.start) for each in sequence.closed], READ)

    def decode(self, sequence: Sequence) -> None:
        """``sequence`` decodes from the next refresh on."""
        self._added[sequence.row] = None

    def stop(self, sequence: Sequence) -> None:
        """``sequence`` decodes no more from the next refresh on."""
        if self._added.pop(sequence.row, self) is self:
            self._closed[sequence.row] = True

    def close(self, sequence: Sequence) -> None:
        """``sequence`` holds nothing any more."""
        self.stop(sequence)
        self._reads.pop(sequence.row, None)
        self._free.append(sequence.row)
        self.copies[sequence.row], sequence.copy_shared, sequence.copy_chain_id = -1, [], None
        sequence.worker, sequence.table, sequence.row = -1, None, -1

    def refresh(self) -> None:
        """Drop the rows closed, append those added, and restore the order."""
        closed = self._closed[self.rows]
        if self._added or closed.any():
            self.rows = np.append(self.rows[~closed], np.array(list(self._added), np.int64))
            self._added.clear()
        self._closed[:] = False
        self.sort()

    def sort(self) -> None:
        """Restore the order: by the R-worker that attends, longest context first."""
        key = (self.attending(self.rows) << 40) - self.num_cached[self.rows]
        if (key[1:] < key[:-1]).any():
            self.rows = self.rows[np.argsort(key, kind="stable")]  # nearly sorted: linear

    def attending(self, rows: np.ndarray) -> np.ndarray:
        """The R-workers that attend ``rows``, or their tails; int64 [n]."""
        return np.where(self.on_copy[rows], self.copies[rows], self.workers[rows])

    def count_held(self, rows: np.ndarray, counts: np.ndarray | int, num_workers: int) -> np.ndarray:
        """``counts`` of each of ``rows`` summed over R-workers, second copies included; int64 [num_workers]."""
        weights = np.broadcast_to(counts, rows.shape)
        held = np.bincount(self.workers[rows], weights, num_workers)
        copied = rows[self.copies[rows] >= 0]
        if len(copied):
            held += np.bincount(self.copies[copied], weights[self.copies[rows] >= 0], num_workers)
        return held.astype(np.int64)

    def num_outputs(self, rows: np.ndarray) -> np.ndarray:
        """Output tokens that decoding sequences have: all but the last are cached; int64 [n]."""
        return self.num_cached[rows] - self.prompt_lens[rows] + 1

    def advance(self, rows: np.ndarray) -> None:
        """The next tokens of ``rows`` are cached."""
        self.num_cached[rows] += 1

    def tail_lens(self, rows: np.ndarray) -> np.ndarray:
        """Cached tokens of the tails of ``rows``; int64 [n]."""
        return self.num_cached[rows] - self.bases[rows]

    def reads(self, rows: np.ndarray) -> np.ndarray:
        """READ records of ``rows``: their closed ranges, with the place of each in ``rows``, in order."""
        if not self._reads:
            return NO_READS
        found = {}
        for row, records in self._reads.items():
            for place in np.flatnonzero(rows == row).tolist():
                found[place] = records.copy()
                found[place]["chunk"] = place
        return np.concatenate([found[place] for place in sorted(found)]) if found else NO_READS

    def kv_loads(self, num_workers: int) -> np.ndarray:
        """KV tokens that each R-worker attends if all rows decode, float64 [num_workers]."""
        tokens = self.tail_lens(self.rows) + 1
        loads = np.bincount(self.attending(self.rows), tokens, num_workers).astype(np.float64)
        if self._reads:
            loads += self.range_tokens * np.bincount(self.reads(self.rows)["worker"], minlength=num_workers)
        return loads

    def cached_in_ranges(self) -> dict[int, int]:
        """Cached tokens of each sequence with closed ranges."""
        return {int(self.chunks["sequence_id"][row]): int(self.num_cached[row]) for row in self._reads}

    def loads_on(self, worker: int, rows: np.ndarray) -> np.ndarray:
        """KV tokens that each of ``rows`` has R-worker ``worker`` attend; int64 [n]."""
        loads = np.where(self.attending(rows) == worker, self.tail_lens(rows) + 1, 0)
        reads = self.reads(rows)
        return loads + self.range_tokens * np.bincount(reads["chunk"][reads["worker"] == worker], minlength=len(rows))

    def mini_batch(self, rows: np.ndarray) -> MiniBatch:
        """The next chunks of ``rows``, with their tokens: the last one, and drafts."""
        chunks, last, num_drafts = self.chunks.take(rows), self.last_tokens.take(rows), self.num_drafts[rows]
        reads, swapped = self.reads(rows), self.on_copy[rows]
        if swapped.any():
            homes = chunks["worker"][swapped]
            chunks["worker"][swapped], chunks["copy"][swapped] = chunks["copy"][swapped], homes
        if not num_drafts.any():
            return MiniBatch(chunks, last, reads)
        chunks["num_rows"], chunks["scored"] = 1 + num_drafts, num_drafts > 0
        tokens = np.column_stack([last, self.drafts[rows]])
        return MiniBatch(chunks, tokens[np.arange(tokens.shape[1]) <= num_drafts[:, None]], reads)
