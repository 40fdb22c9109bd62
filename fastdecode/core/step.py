"""A step as the scheduler plans it: which tokens of which sequences, in which mini-batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from fastdecode.core.remote_prefill import RemotePrefill
from fastdecode.core.routes import plan_mini_batch, read_ends
from fastdecode.core.types import CONTROL, StepPlan, WorkerPlan

CHUNK = np.dtype(
    [
        ("sequence_id", "<i8"),
        ("worker", "<i8"),
        ("context_len", "<i8"),
        ("num_rows", "<i8"),
        ("attends", "?"),
        ("samples", "?"),
        ("last_of_prompt", "?"),
        ("is_decode", "?"),
        ("scored", "?"),
        ("base", "<i8"),
        ("cache_id", "<i8"),
        ("copy", "<i8"),
    ]
)
"""A :class:`Chunk` without its tokens, as a record: thousands of decodes are planned as one array.

``worker`` stores the rows and attends; ``copy`` is the R-worker that stores them too, or -1.
"""

CHUNK_FIELDS: tuple[str, ...] = CHUNK.names or ()

READ = np.dtype([("chunk", "<i8"), ("worker", "<i8"), ("range_id", "<i8"), ("start", "<i8")])
"""A closed range that a chunk attends to: ``chunk`` is its index in the mini-batch, ``start`` the range's first token.

R-worker ``worker`` attends to it, any one that holds the range, as its sequence ``range_id``. It ends where the chunk's
next range starts, or at the chunk's ``base``.
"""

NO_READS = np.zeros(0, READ)


@dataclass(frozen=True)
class Chunk:
    """Consecutive new tokens of one sequence in a step: when it decodes its last one and draft tokens, else a prompt's.

    ``attends``: on the R-worker that holds the sequence; otherwise on the S-worker, over its prompt scratch.
    ``samples``: its last token's logits are wanted. ``last_of_prompt``: the scratch is not needed after it.
    ``is_decode``: no prompt token is among them. ``scored``: the logits of all its tokens are wanted. ``base``: tokens
    before the range that the chunk's own worker holds, the tail; a chunk ends where its range does. ``reads``: worker,
    range id and start of the closed ranges before it, in order; those that no layer's window reaches may be missing.
    ``cache_id``: what the worker calls the sequence that the rows are appended to; None: ``sequence_id``. ``copy``: the
    R-worker with the sequence's second copy, which stores the chunk's keys and values too, under the same id; -1: none.
    """

    sequence_id: int
    worker: int
    context_len: int
    token_ids: Sequence[int]
    attends: bool = True
    samples: bool = True
    last_of_prompt: bool = True
    is_decode: bool = True
    scored: bool = False
    base: int = 0
    cache_id: int | None = None
    reads: tuple[tuple[int, int, int], ...] = ()
    copy: int = -1

    @property
    def record(self) -> tuple[int | bool, ...]:
        """The chunk as a CHUNK record."""
        cache_id = self.sequence_id if self.cache_id is None else self.cache_id
        named = {**vars(self), "num_rows": len(self.token_ids), "cache_id": cache_id}
        return tuple(named[name] for name in CHUNK_FIELDS)


def joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """CHUNK records one after the other: as bytes, since numpy concatenates records field by field, ten times slower.

    (For the same reason thousands of records are selected with ``take``, never with an index.)
    """
    return np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in parts]).view(CHUNK)


@dataclass(frozen=True, eq=False)
class MiniBatch:
    """The chunks that one forward of the model computes, one after the other.

    ``chunks``: CHUNK [num_chunks], sorted by R-worker, attending ones first, and of these the ones without closed
    ranges, so that a worker's payload is one slice of the rows. ``token_ids``: int64 [num_rows], in the same order.
    ``reads``: READ [num_reads], the closed ranges of all chunks, by chunk and in range order; empty for nearly all.
    """

    chunks: np.ndarray
    token_ids: np.ndarray
    reads: np.ndarray = field(default_factory=lambda: NO_READS)

    @staticmethod
    def of(chunks: Iterable[Chunk]) -> MiniBatch:
        """The given chunks, in the given order."""
        listed = list(chunks)
        tokens = [token for chunk in listed for token in chunk.token_ids]
        reads = [(index, *read) for index, chunk in enumerate(listed) for read in chunk.reads]
        records = np.array([chunk.record for chunk in listed], CHUNK)
        return MiniBatch(records, np.array(tokens, np.int64), np.array(reads, READ))

    @staticmethod
    def sorted(parts: Sequence[MiniBatch]) -> MiniBatch:
        """The chunks of ``parts`` as one mini-batch, by R-worker and in the order of ``chunks``, else in order."""
        reads = NO_READS
        if any(len(part.reads) for part in parts):
            reads = np.concatenate([part.reads for part in parts])
            firsts = np.cumsum([0, *(len(part) for part in parts[:-1])])
            reads["chunk"] += np.repeat(firsts, [len(part.reads) for part in parts])
        chunks, tokens = joined([part.chunks for part in parts]), np.concatenate([part.token_ids for part in parts])
        rank = np.where(chunks["attends"], chunks["base"] > 0, 2)
        return MiniBatch(chunks, tokens, reads).take(np.argsort(chunks["worker"] * 3 + rank, kind="stable"))

    def take(self, places: np.ndarray) -> MiniBatch:
        """The chunks at ``places``, in that order, with their tokens and ranges."""
        chunks, reads = self.chunks.take(places), self._reads_of(places) if len(self.reads) else NO_READS
        if len(self.token_ids) == len(self.chunks):  # a row each, as where nothing is drafted
            return MiniBatch(chunks, self.token_ids.take(places), reads)
        counts, starts = chunks["num_rows"], np.cumsum(self.chunks["num_rows"]) - self.chunks["num_rows"]
        rows = np.repeat(starts[places] - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
        return MiniBatch(chunks, self.token_ids.take(rows), reads)

    def _reads_of(self, places: np.ndarray) -> np.ndarray:
        """READ records of the chunks at ``places``, as these will be numbered."""
        new = np.full(len(self.chunks), -1)
        new[places] = np.arange(len(places))
        reads = self.reads.copy()
        reads["chunk"] = new[reads["chunk"]]
        reads = reads[reads["chunk"] >= 0]
        return reads[np.argsort(reads["chunk"], kind="stable")]

    def __len__(self) -> int:
        """Number of chunks."""
        return len(self.chunks)

    def __iter__(self) -> Iterator[Chunk]:
        """The chunks one by one, for callers that need few of them."""
        tokens, end = self.token_ids.tolist(), 0
        for index, record in enumerate(self.chunks.tolist()):
            fields: dict[str, Any] = dict(zip(CHUNK_FIELDS, record, strict=True))
            num_rows = fields.pop("num_rows")
            end += num_rows
            if fields["cache_id"] == fields["sequence_id"]:
                fields["cache_id"] = None
            mine = self.reads[self.reads["chunk"] == index]
            reads = tuple(mine[["worker", "range_id", "start"]].tolist())
            yield Chunk(token_ids=tokens[end - num_rows : end], reads=reads, **fields)

    @property
    def read_ends(self) -> np.ndarray:
        """One past the last token of each of ``reads``, int64 [num_reads]."""
        return read_ends(self.chunks, self.reads)

    @cached_property
    def prompts(self) -> np.ndarray:
        """The records of the chunks that hold prompt tokens."""
        return self.chunks.take(np.flatnonzero(~self.chunks["is_decode"]))

    @property
    def sampled_ids(self) -> list[int]:
        """Sequences whose last token's logits are wanted, in order."""
        return self.chunks["sequence_id"][self.chunks["samples"]].tolist()

    @property
    def num_logits(self) -> dict[int, int]:
        """Rows of logits that each of ``sampled_ids`` samples from: those of its draft tokens too, else one."""
        drafted = self.chunks["scored"] & self.chunks["is_decode"]
        counts = np.where(drafted, self.chunks["num_rows"], 1)[self.chunks["samples"]]
        return dict(zip(self.sampled_ids, counts.tolist(), strict=True))


@dataclass(frozen=True, eq=False)
class ScheduledStep:
    """The scheduler's answer: the mini-batches, and the controls of each R-worker.

    ``num_starts``: requests that begin in this step for the first time. ``prefills``: prompts that prefill workers are
    to compute once the R-workers have heard the controls. ``arrived``: sequences whose prompts they have computed: the
    controls commit their keys and values, and their first token is to be sampled. ``drafts``: draft tokens that follow
    the last token of sequences that decode, by sequence. ``taps``: of each mini-batch the rows whose queries are kept
    until its end, int64 [num_tapped]; empty where none are.
    """

    mini_batches: tuple[MiniBatch, ...]
    controls: tuple[tuple[tuple[int, int, int, int], ...], ...]
    num_starts: int = 0
    prefills: tuple[RemotePrefill, ...] = ()
    arrived: tuple[int, ...] = ()
    drafts: Mapping[int, list[int]] = field(default_factory=dict)
    taps: tuple[np.ndarray, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Rows of the whole step."""
        return sum(len(mini_batch.token_ids) for mini_batch in self.mini_batches)

    @cached_property
    def kv_loads(self) -> list[int]:
        """Cached tokens that each R-worker attends in this step, over its sequences and ranges, the new tokens
        included."""
        loads = np.zeros(len(self.controls))
        for mini_batch in self.mini_batches:
            chunks, reads = mini_batch.chunks, mini_batch.reads
            tokens = (chunks["context_len"] - chunks["base"] + chunks["num_rows"]) * chunks["attends"]
            loads += np.bincount(chunks["worker"], tokens, len(loads))
            if len(reads):
                loads += np.bincount(reads["worker"], mini_batch.read_ends - reads["start"], len(loads))
        return loads.astype(int).tolist()

    @property
    def kv_load(self) -> int:
        """Cached tokens attended in this step, over all R-workers."""
        return sum(self.kv_loads)

    @cached_property
    def is_decode(self) -> bool:
        """True when no chunk holds prompt tokens, that is, every sequence adds new tokens to finished context."""
        return not any(len(mini_batch.prompts) for mini_batch in self.mini_batches)

    @cached_property
    def num_prompt_rows(self) -> int:
        """Rows of prompts."""
        return 0 if self.is_decode else sum(int(each.prompts["num_rows"].sum()) for each in self.mini_batches)

    @cached_property
    def scored_prompts(self) -> list[int]:
        """Sequences that have rows of a scored prompt in this step."""
        parts = [] if self.is_decode else [each.prompts for each in self.mini_batches]
        return [int(each) for part in parts for each in part["sequence_id"][part["scored"]]]

    @property
    def only_decodes_attend(self) -> bool:
        """True when no prompt attends on an R-worker."""
        return not any(bool(mini_batch.prompts["attends"].any()) for mini_batch in self.mini_batches)

    def to_step_plan(self) -> StepPlan:
        """The same step as the R-workers see it."""
        num_workers = len(self.controls)
        parts = [plan_mini_batch(each.chunks, each.reads, num_workers) for each in self.mini_batches]
        workers = tuple(
            WorkerPlan(np.array(list(controls), dtype=CONTROL), tuple(spans[worker] for spans, _ in parts))
            for worker, controls in enumerate(self.controls)
        )
        return StepPlan(workers, tuple(routes for _, routes in parts))


def deal(decodes: MiniBatch, prompts: Iterable[Chunk], num_mini_batches: int) -> tuple[MiniBatch, ...]:
    """Split a step into mini-batches, each in the order of ``MiniBatch.chunks``.

    ``decodes`` come ordered by worker, longest context first, and are dealt in snake order (0 1 1 0 0 1 …): counts
    differ by one at most and loads stay close, whichever sequences came or went. Prompt chunks, longest first, then go
    to the mini-batch that has the fewest rows.
    """
    snake = np.array([*range(num_mini_batches), *reversed(range(num_mini_batches))])
    turn = snake[np.arange(len(decodes)) % len(snake)]
    places = [np.flatnonzero(turn == i) for i in range(num_mini_batches)]
    dealt = [decodes.take(place) for place in places]
    rows = [len(part.token_ids) for part in dealt]
    added: list[list[Chunk]] = [[] for _ in dealt]
    for chunk in sorted(prompts, key=lambda chunk: -len(chunk.token_ids)):
        smallest = rows.index(min(rows))
        added[smallest].append(chunk)
        rows[smallest] += len(chunk.token_ids)
    return tuple(
        MiniBatch.sorted([part, MiniBatch.of(chunks)]) if chunks or part.chunks["base"].any() else part
        for part, chunks in zip(dealt, added, strict=True)
    )
