"""A step as the scheduler plans it: the tokens of each sequence in each mini-batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from fastdecode.core.remote_prefill import RemotePrefill
from fastdecode.core.routes import plan_mini_batch, read_ends
from fastdecode.core.types import CONTROL, Handover, StepPlan, WorkerPlan

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
"""A :class:`Chunk` without its tokens, as a record. Thousands of decodes are planned as one array.
R-worker ``worker`` stores the rows and attends. ``copy``: the R-worker that stores the second copy; -1 for none.
"""

CHUNK_FIELDS: tuple[str, ...] = CHUNK.names or ()

READ = np.dtype([("chunk", "<i8"), ("worker", "<i8"), ("range_id", "<i8"), ("start", "<i8")])
"""A closed segment that a chunk attends to.
``chunk``: the chunk's index in the mini-batch; ``start``: the segment's first token. R-worker ``worker`` holds the
segment as its sequence ``range_id``. The segment ends where the chunk's next one starts, or at the chunk's ``base``.
"""

NO_READS = np.zeros(0, READ)


@dataclass(frozen=True)
class Chunk:
    """Consecutive new tokens of one sequence in a step: prompt tokens, or its last token with draft tokens.
    ``attends``: True if the rows attend on R-workers; False if on the S-worker, over its prompt scratch. ``samples``:
    the last token needs logits; ``scored``: all tokens do. ``last_of_prompt``: the scratch is not needed afterwards.
    ``is_decode``: the chunk has no prompt token. ``base``: first position of the segment on R-worker ``worker`` to
    which the tokens are appended; they all fit there. ``reads``: for each earlier segment, in order, its R-worker,
    range id and start; segments that no layer's window reaches may be missing. ``cache_id``: the id under which
    ``worker`` stores the rows; None for ``sequence_id``. ``copy``: the R-worker that stores a second copy, under the
    same id; if none, it is -1.
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
    """Return ``parts``, CHUNK records, as one array. Bytes are joined, since numpy joins records ten times more slowly.
    For the same reason, select thousands of records with ``take``, never with an index.
    """
    return np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in parts]).view(CHUNK)


@dataclass(frozen=True, eq=False)
class MiniBatch:
    """The chunks that one forward pass computes, in order.
    ``chunks``: CHUNK [num_chunks], sorted by R-worker; for one R-worker, attending chunks come first, beginning with
    those of sequences in one segment. So an R-worker's payload is one slice of the rows. ``token_ids``: int64
    [num_rows], in the same order. ``reads``: READ [num_reads], the earlier segments of each chunk's sequence, by chunk
    and in order; mostly empty.
    """

    chunks: np.ndarray
    token_ids: np.ndarray
    reads: np.ndarray = field(default_factory=lambda: NO_READS)

    @staticmethod
    def of(chunks: Iterable[Chunk]) -> MiniBatch:
        """Return a mini-batch of ``chunks``, in their order."""
        listed = list(chunks)
        tokens = [token for chunk in listed for token in chunk.token_ids]
        reads = [(index, *read) for index, chunk in enumerate(listed) for read in chunk.reads]
        records = np.array([chunk.record for chunk in listed], CHUNK)
        return MiniBatch(records, np.array(tokens, np.int64), np.array(reads, READ))

    @staticmethod
    def sorted(parts: Sequence[MiniBatch]) -> MiniBatch:
        """Return all chunks of ``parts`` as one mini-batch, in the order that ``chunks`` must have.
        The sort is stable.
        """
        reads = NO_READS
        if any(len(part.reads) for part in parts):
            reads = np.concatenate([part.reads for part in parts])
            firsts = np.cumsum([0, *(len(part) for part in parts[:-1])])
            reads["chunk"] += np.repeat(firsts, [len(part.reads) for part in parts])
        chunks, tokens = joined([part.chunks for part in parts]), np.concatenate([part.token_ids for part in parts])
        rank = np.where(chunks["attends"], chunks["base"] > 0, 2)
        return MiniBatch(chunks, tokens, reads).take(np.argsort(chunks["worker"] * 3 + rank, kind="stable"))

    def take(self, places: np.ndarray) -> MiniBatch:
        """Return a mini-batch of the chunks with indices ``places``, in that order."""
        chunks, reads = self.chunks.take(places), self._reads_of(places) if len(self.reads) else NO_READS
        if len(self.token_ids) == len(self.chunks):  # without drafts, each decode is one row
            return MiniBatch(chunks, self.token_ids.take(places), reads)
        counts, starts = chunks["num_rows"], np.cumsum(self.chunks["num_rows"]) - self.chunks["num_rows"]
        rows = np.repeat(starts[places] - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
        return MiniBatch(chunks, self.token_ids.take(rows), reads)

    def _reads_of(self, places: np.ndarray) -> np.ndarray:
        """Return the READ records of the chunks ``places``, with these chunks numbered 0, 1, … in the records."""
        new = np.full(len(self.chunks), -1)
        new[places] = np.arange(len(places))
        reads = self.reads.copy()
        reads["chunk"] = new[reads["chunk"]]
        reads = reads[reads["chunk"] >= 0]
        return reads[np.argsort(reads["chunk"], kind="stable")]

    def __len__(self) -> int:
        """Return the number of chunks."""
        return len(self.chunks)

    def __iter__(self) -> Iterator[Chunk]:
        """Yield the chunks as ``Chunk`` objects, which is slow for many chunks."""
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
        """For each READ record in ``reads``, the position after its segment's last token: int64 [num_reads]."""
        return read_ends(self.chunks, self.reads)

    @cached_property
    def prompts(self) -> np.ndarray:
        """The records of the chunks that hold prompt tokens."""
        return self.chunks.take(np.flatnonzero(~self.chunks["is_decode"]))

    @property
    def sampled_ids(self) -> list[int]:
        """Ids of the sequences that sample a token, in order."""
        return self.chunks["sequence_id"][self.chunks["samples"]].tolist()

    @property
    def num_logits(self) -> dict[int, int]:
        """The number of rows with logits, by id of sequences that sample: one, plus one per draft token."""
        if len(self.token_ids) == len(self.chunks):  # each chunk has one row
            return dict.fromkeys(self.sampled_ids, 1)
        drafted = self.chunks["scored"] & self.chunks["is_decode"]
        counts = np.where(drafted, self.chunks["num_rows"], 1)[self.chunks["samples"]]
        return dict(zip(self.sampled_ids, counts.tolist(), strict=True))


@dataclass(frozen=True, eq=False)
class ScheduledStep:
    """One scheduled step: the mini-batches, and the controls of each R-worker.
    ``num_starts``: requests that start for the first time. ``prefills``: prompts to send to prefill workers once the
    R-workers have the controls. ``arrived``: sequences whose prompts prefill workers have computed: the controls commit
    their keys and values, and this step samples their first token. ``drafts``: draft tokens of decoding sequences, by
    sequence. ``taps``: per mini-batch, the rows whose queries must be kept until the step ends, int64 [num_tapped];
    empty if there are none. ``handovers``: recurrent states to copy before the rows, for segments that begin.
    """

    mini_batches: tuple[MiniBatch, ...]
    controls: tuple[tuple[tuple[int, int, int, int], ...], ...]
    num_starts: int = 0
    prefills: tuple[RemotePrefill, ...] = ()
    arrived: tuple[int, ...] = ()
    drafts: Mapping[int, list[int]] = field(default_factory=dict)
    taps: tuple[np.ndarray, ...] = ()
    handovers: tuple[Handover, ...] = ()

    @property
    def num_tokens(self) -> int:
        """The number of rows in all mini-batches."""
        return sum(len(mini_batch.token_ids) for mini_batch in self.mini_batches)

    @cached_property
    def kv_loads(self) -> list[int]:
        """KV tokens that each R-worker attends to in this step, the new tokens included."""
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
        """KV tokens that all R-workers together attend to in this step."""
        return sum(self.kv_loads)

    @cached_property
    def is_decode(self) -> bool:
        """True if no chunk holds prompt tokens, so that every sequence decodes."""
        return not any(len(mini_batch.prompts) for mini_batch in self.mini_batches)

    @cached_property
    def num_prompt_rows(self) -> int:
        """The number of prompt rows in all mini-batches."""
        return 0 if self.is_decode else sum(int(each.prompts["num_rows"].sum()) for each in self.mini_batches)

    @cached_property
    def scored_prompts(self) -> list[int]:
        """Ids of sequences whose prompt is scored and has rows in this step."""
        parts = [] if self.is_decode else [each.prompts for each in self.mini_batches]
        return [int(each) for part in parts for each in part["sequence_id"][part["scored"]]]

    @property
    def only_decodes_attend(self) -> bool:
        """True if no prompt row attends on an R-worker."""
        return not any(bool(mini_batch.prompts["attends"].any()) for mini_batch in self.mini_batches)

    def to_step_plan(self) -> StepPlan:
        """Return this step as a plan for the R-workers."""
        num_workers = len(self.controls)
        parts = [plan_mini_batch(each.chunks, each.reads, num_workers) for each in self.mini_batches]
        workers = tuple(
            WorkerPlan(np.array(list(controls), dtype=CONTROL), tuple(spans[worker] for spans, _ in parts))
            for worker, controls in enumerate(self.controls)
        )
        return StepPlan(workers, tuple(routes for _, routes in parts), self.handovers)


def deal(decodes: MiniBatch, prompts: Iterable[Chunk], num_mini_batches: int) -> tuple[MiniBatch, ...]:
    """Split a step into mini-batches, whose chunks have the order of ``MiniBatch.chunks``.
    ``decodes`` are ordered by worker, longest context first, and divided in snake order (0 1 1 0 0 1 …). So the
    mini-batches' numbers of decodes differ by at most one, and their KV loads stay close. Each prompt chunk, longest
    first, goes to the mini-batch with the fewest rows.
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
