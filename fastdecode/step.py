"""A step as the scheduler plans it: which tokens of which sequences, in which mini-batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from fastdecode.types import CONTROL, SPAN, StepPlan, WorkerPlan

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
    ]
)
"""A :class:`Chunk` without its tokens, as a record: thousands of decodes are planned as one array."""


@dataclass(frozen=True)
class Chunk:
    """Consecutive new tokens of one sequence in a step: when it decodes its last one and draft tokens, else a prompt's.

    ``attends``: on the R-worker that holds the sequence; otherwise on the S-worker, over its prompt scratch.
    ``samples``: its last token's logits are wanted. ``last_of_prompt``: the scratch is not needed after it.
    ``is_decode``: no prompt token is among them. ``scored``: the logits of all its tokens are wanted.
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

    @property
    def record(self) -> tuple[int | bool, ...]:
        """The chunk as a CHUNK record."""
        return (
            self.sequence_id,
            self.worker,
            self.context_len,
            len(self.token_ids),
            self.attends,
            self.samples,
            self.last_of_prompt,
            self.is_decode,
            self.scored,
        )


def joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """CHUNK records one after the other: as bytes, since numpy concatenates records field by field, ten times slower.

    (For the same reason thousands of records are selected with ``take``, never with an index.)
    """
    return np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in parts]).view(CHUNK)


@dataclass(frozen=True, eq=False)
class MiniBatch:
    """The chunks that one forward of the model computes, one after the other.

    ``chunks``: CHUNK [num_chunks], sorted by R-worker, attending ones first, so that a worker's payload is one slice
    of the rows. ``token_ids``: int64 [num_rows], in the same order.
    """

    chunks: np.ndarray
    token_ids: np.ndarray

    @staticmethod
    def of(chunks: Iterable[Chunk]) -> MiniBatch:
        """The given chunks, in the given order."""
        listed = list(chunks)
        tokens = [token for chunk in listed for token in chunk.token_ids]
        return MiniBatch(np.array([chunk.record for chunk in listed], CHUNK), np.array(tokens, np.int64))

    @staticmethod
    def sorted(parts: Sequence[MiniBatch]) -> MiniBatch:
        """The chunks of ``parts`` as one mini-batch, by R-worker with attending ones first, else in order."""
        both = MiniBatch(joined([part.chunks for part in parts]), np.concatenate([part.token_ids for part in parts]))
        return both.take(np.argsort(both.chunks["worker"] * 2 + ~both.chunks["attends"], kind="stable"))

    def take(self, places: np.ndarray) -> MiniBatch:
        """The chunks at ``places``, in that order, with their tokens."""
        chunks = self.chunks.take(places)
        if len(self.token_ids) == len(self.chunks):  # a row each, as where nothing is drafted
            return MiniBatch(chunks, self.token_ids.take(places))
        counts, starts = chunks["num_rows"], np.cumsum(self.chunks["num_rows"]) - self.chunks["num_rows"]
        rows = np.repeat(starts[places] - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
        return MiniBatch(chunks, self.token_ids.take(rows))

    def __len__(self) -> int:
        """Number of chunks."""
        return len(self.chunks)

    def __iter__(self) -> Iterator[Chunk]:
        """The chunks one by one, for callers that need few of them."""
        tokens, end = self.token_ids.tolist(), 0
        for sequence_id, worker, context_len, num_rows, *flags in self.chunks.tolist():
            end += num_rows
            yield Chunk(sequence_id, worker, context_len, tokens[end - num_rows : end], *flags)

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
        """Rows of logits that each of ``sampled_ids`` gets: those of all its tokens where they are scored, else one."""
        counts = np.where(self.chunks["scored"], self.chunks["num_rows"], 1)[self.chunks["samples"]]
        return dict(zip(self.sampled_ids, counts.tolist(), strict=True))


@dataclass(frozen=True)
class PrefillPart:
    """Tokens ``start`` to ``end`` of a prompt, which prefill worker ``worker`` computes."""

    worker: int
    start: int
    end: int


@dataclass(frozen=True)
class RemotePrefill:
    """A prompt that prefill workers compute: its tokens, cut into consecutive ``parts``, but for a cached prefix.

    ``job_id`` is new for every attempt: the R-worker ``r_worker`` has reserved blocks under it, and refuses rows of any
    other. ``method``: one of ``PREFILL_METHODS``.
    """

    job_id: int
    sequence_id: int
    r_worker: int
    token_ids: tuple[int, ...]
    parts: tuple[PrefillPart, ...]
    method: str = "kvr"

    @property
    def context_len(self) -> int:
        """Tokens of the prefix, which the R-worker has."""
        return self.parts[0].start


@dataclass(frozen=True, eq=False)
class Prefilled:
    """A prompt that prefill workers have computed, and its R-worker has stored.

    ``logits``: of its last token, [vocab_size] in the model's dtype, 16-bit floats as uint16. ``seconds``: of its
    slowest part. ``sent_bytes`` of keys and values went from one prefill worker to another, ``stored_bytes`` to the
    R-worker, and ``read_bytes`` of its prefix came from there.
    """

    sequence_id: int
    job_id: int
    logits: np.ndarray
    seconds: float
    sent_bytes: int
    stored_bytes: int
    read_bytes: int = 0


class PrefillOutcomes(NamedTuple):
    """Prompts that are computed, jobs that failed, and prefill workers that were lost and that have joined."""

    computed: list[Prefilled]
    failed: list[int]
    lost: list[int]
    joined: list[int]


@dataclass(frozen=True, eq=False)
class ScheduledStep:
    """The scheduler's answer: the mini-batches, and the controls of each R-worker.

    ``num_starts``: requests that begin in this step for the first time. ``prefills``: prompts that prefill workers are
    to compute once the R-workers have heard the controls. ``arrived``: sequences whose prompts they have computed: the
    controls commit their keys and values, and their first token is to be sampled. ``drafts``: draft tokens that follow
    the last token of sequences that decode, by sequence.
    """

    mini_batches: tuple[MiniBatch, ...]
    controls: tuple[tuple[tuple[int, int, int, int], ...], ...]
    num_starts: int = 0
    prefills: tuple[RemotePrefill, ...] = ()
    arrived: tuple[int, ...] = ()
    drafts: Mapping[int, list[int]] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Rows of the whole step."""
        return sum(len(mini_batch.token_ids) for mini_batch in self.mini_batches)

    @cached_property
    def kv_loads(self) -> list[int]:
        """Cached tokens that each R-worker attends in this step, over its sequences, the new tokens included."""
        loads = np.zeros(len(self.controls))
        for mini_batch in self.mini_batches:
            chunks = mini_batch.chunks
            tokens = (chunks["context_len"] + chunks["num_rows"]) * chunks["attends"]
            loads += np.bincount(chunks["worker"], tokens, len(loads))
        return loads.astype(int).tolist()

    @property
    def kv_load(self) -> int:
        """Cached tokens attended in this step, over all R-workers."""
        return sum(self.kv_loads)

    @property
    def is_decode(self) -> bool:
        """True when no chunk holds prompt tokens, that is, every sequence adds new tokens to finished context."""
        return not any(len(mini_batch.prompts) for mini_batch in self.mini_batches)

    @property
    def num_prompt_rows(self) -> int:
        """Rows of prompts."""
        return sum(int(mini_batch.prompts["num_rows"].sum()) for mini_batch in self.mini_batches)

    @property
    def only_decodes_attend(self) -> bool:
        """True when no prompt attends on an R-worker."""
        return not any(bool(mini_batch.prompts["attends"].any()) for mini_batch in self.mini_batches)

    def to_step_plan(self) -> StepPlan:
        """The same step as the R-workers see it."""
        return StepPlan(tuple(self._worker_plan(worker) for worker in range(len(self.controls))))

    def _worker_plan(self, worker: int) -> WorkerPlan:
        spans = tuple(_spans(mini_batch.chunks, worker) for mini_batch in self.mini_batches)
        return WorkerPlan(np.array(list(self.controls[worker]), dtype=CONTROL), spans)


def _spans(chunks: np.ndarray, worker: int) -> np.ndarray:
    """One worker's chunks, which are sorted by worker, as SPAN records."""
    first, last = np.searchsorted(chunks["worker"], [worker, worker + 1])
    spans = np.empty(last - first, dtype=SPAN)
    for name in SPAN.names or ():
        spans[name] = chunks[name][first:last]
    return spans


def deal(decodes: MiniBatch, prompts: Iterable[Chunk], num_mini_batches: int) -> tuple[MiniBatch, ...]:
    """Split a step into mini-batches, each sorted by worker with its attending chunks first.

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
        MiniBatch.sorted([part, MiniBatch.of(chunks)]) if chunks else part
        for part, chunks in zip(dealt, added, strict=True)
    )
