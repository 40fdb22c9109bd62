"""One sequence as the scheduler knows it, and the table of those that decode."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from fastdecode.scheduler.worker_state import Block
from fastdecode.step import CHUNK, MiniBatch, joined

GONE = -1
"""In place of the id of a sequence that was removed."""


@dataclass(eq=False)
class Sequence:
    """``max_tokens`` bounds the output; ``num_cached`` tokens of prompt + output are in an R-worker's cache.

    ``sequence_id`` grows with arrival: a lower one is older. ``siblings`` share the prompt (``SamplingParams.n`` > 1):
    this sequence computes it, and they are forked from it once it is cached. ``num_prefill`` tokens have to be computed
    before it can decode: its prompt, and after a preemption also its output so far.

    It holds ``num_blocks`` blocks, of which the first are ``shared`` with the prefix cache or with siblings. While it
    decodes, :class:`DecodeTable` keeps ``num_cached`` and ``num_blocks``. ``outputs_at_start``: output tokens that it
    had when it last began, None before its first start. ``may_stop``: its output may end before ``max_tokens``.
    """

    sequence_id: int
    prompt_token_ids: list[int]
    max_tokens: int
    siblings: tuple[Sequence, ...] = ()
    output_token_ids: list[int] = field(default_factory=list)
    worker: int = -1
    num_cached: int = 0
    num_prefill: int = 0
    num_blocks: int = 0
    uses_scratch: bool = False
    shared: list[Block] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    chain_id: int | None = None
    outputs_at_start: int | None = None
    may_stop: bool = False
    was_preempted: bool = False
    _last_token: np.ndarray | None = None

    def append(self, token_id: int) -> None:
        """One more output token."""
        self.output_token_ids.append(token_id)
        if self._last_token is not None:
            self._last_token[0] = token_id

    def keep_last_token(self, place: np.ndarray | None) -> None:
        """From here on the last output token is also written to ``place``, int64 [1]."""
        self._last_token = place
        if place is not None and self.output_token_ids:
            place[0] = self.output_token_ids[-1]

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
    def in_prompt(self) -> bool:
        """True while tokens remain to be computed before it can decode."""
        return self.num_cached < self.num_prefill

    def tokens(self, start: int, count: int) -> list[int]:
        """``count`` tokens of prompt + output from position ``start``."""
        num_prompt = len(self.prompt_token_ids)
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : start - num_prompt + count]
        head = self.prompt_token_ids[start : start + count]
        return head + self.output_token_ids[: count - len(head)]


class DecodeTable:
    """One row per decoding sequence, ordered by R-worker and longest context first.

    ``chunks``: CHUNK [n], each sequence's next step. ``num_outputs``, ``max_tokens``, ``num_blocks``: int64 [n].
    ``slots``: int64 [n], where each sequence's last token is; it writes it there itself, since looking it up in
    thousands of lists takes longer than all the rest. Rows keep their places until :meth:`refresh`, slots always.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._last_tokens = np.zeros(max_num_seqs, np.int64)
        self._free_slots = list(range(max_num_seqs))
        self._slots: dict[int, int] = {}
        self._columns: dict[str, np.ndarray] = {
            "chunks": np.zeros(0, CHUNK),
            "num_outputs": np.zeros(0, np.int64),
            "max_tokens": np.zeros(0, np.int64),
            "num_blocks": np.zeros(0, np.int64),
            "slots": np.zeros(0, np.int64),
        }
        self._ids = np.zeros(0, np.int64)
        self._added: list[Sequence] = []

    @property
    def chunks(self) -> np.ndarray:
        """CHUNK [n]."""
        return self._columns["chunks"]

    @property
    def num_outputs(self) -> np.ndarray:
        """Output tokens so far, int64 [n]."""
        return self._columns["num_outputs"]

    @property
    def max_tokens(self) -> np.ndarray:
        """Most output tokens, int64 [n]."""
        return self._columns["max_tokens"]

    @property
    def num_blocks(self) -> np.ndarray:
        """Blocks held, int64 [n]."""
        return self._columns["num_blocks"]

    def add(self, sequence: Sequence) -> None:
        """``sequence`` decodes from the next refresh on."""
        slot = self._slots[sequence.sequence_id] = self._free_slots.pop()
        sequence.keep_last_token(self._last_tokens[slot : slot + 1])
        self._added.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, with its progress written back to it."""
        self._free_slots.append(self._slots.pop(sequence.sequence_id))
        sequence.keep_last_token(None)
        if sequence in self._added:
            self._added.remove(sequence)
            return
        row = self.row_of(sequence)
        self._ids[row] = GONE
        sequence.num_cached = int(self.chunks["context_len"][row])
        sequence.num_blocks = int(self.num_blocks[row])

    def row_of(self, sequence: Sequence) -> int:
        """The row of a sequence that was there at the last refresh."""
        (row,) = np.flatnonzero(self._ids == sequence.sequence_id)
        return int(row)

    def refresh(self) -> None:
        """Drop the rows of those removed, append those added, and restore the order."""
        here = np.flatnonzero(self._ids != GONE)
        if self._added or len(here) < len(self._ids):
            added = self._rows_of(self._added)
            for name, column in self._columns.items():
                join = joined if name == "chunks" else np.concatenate
                self._columns[name] = join([column.take(here), added[name]])
            self._added.clear()
        key = (self.chunks["worker"] << 40) - self.chunks["context_len"]
        if (key[1:] < key[:-1]).any():
            order = np.argsort(key, kind="stable")  # nearly sorted: linear
            for name, column in self._columns.items():
                self._columns[name] = column.take(order)
        self._ids = self.chunks["sequence_id"].copy()

    def advance(self, rows: np.ndarray) -> None:
        """The next tokens of ``rows`` are cached, and each has one output token more."""
        self.chunks["context_len"][rows] += 1
        self.num_outputs[rows] += 1

    def kv_loads(self, num_workers: int) -> np.ndarray:
        """KV tokens that each R-worker attends if all rows decode, float64 [num_workers]."""
        return np.bincount(self.chunks["worker"], self.chunks["context_len"] + 1, num_workers).astype(np.float64)

    def mini_batch(self, rows: np.ndarray) -> MiniBatch:
        """The next chunks of ``rows`` (ascending), with their tokens; good until the table changes."""
        chunks = self.chunks if len(rows) == len(self.chunks) else self.chunks.take(rows)
        return MiniBatch(chunks, self._last_tokens.take(self._columns["slots"].take(rows)))

    def _rows_of(self, sequences: Iterable[Sequence]) -> dict[str, np.ndarray]:
        listed = list(sequences)
        records = [(s.sequence_id, s.worker, s.num_cached, 1, True, True, True, True, False) for s in listed]
        return {
            "chunks": np.array(records, CHUNK),
            "num_outputs": np.array([len(s.output_token_ids) for s in listed], np.int64),
            "max_tokens": np.array([s.max_tokens for s in listed], np.int64),
            "num_blocks": np.array([s.num_blocks for s in listed], np.int64),
            "slots": np.array([self._slots[s.sequence_id] for s in listed], np.int64),
        }
