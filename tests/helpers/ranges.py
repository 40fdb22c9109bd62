"""Drives sequences whose ranges are on several R-workers through an attention backend, as an engine would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from fastdecode.core.dtypes import to_wire
from fastdecode.core.protocols import AttentionBackend
from fastdecode.core.step import Chunk, MiniBatch, ScheduledStep
from fastdecode.core.types import StepReport, Verb
from fastdecode.kinds import Layer
from fastdecode.kinds.layout import KVLayout

MOST_TOKENS = 1 << 14


@dataclass
class Ranged:
    """A sequence: its length; the holders, id and start of its closed ranges; and the place of its tail."""

    length: int = 0
    holders: tuple[int, ...] = (0,)
    base: int = 0
    closed: list[tuple[tuple[int, ...], int, int]] = field(default_factory=list)


class RangeDriver:
    """Runs steps of sequences in ranges of ``range_tokens`` tokens; range i of sequence s is at ``place(s, i)``.
    With ``copy``, a second copy is at ``copy(s, i)``. The attending holder changes from step to step.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        layout: KVLayout,
        range_tokens: int = MOST_TOKENS,
        place: Callable[[int, int], int] = lambda sequence_id, index: 0,
        copy: Callable[[int, int], int] | None = None,
    ) -> None:
        self.backend, self.layout, self.range_tokens = backend, layout, range_tokens
        self.place, self.copy = place, copy
        self.rng = np.random.default_rng(0)
        self.num_workers = len(backend.open(layout))
        self.sequences: dict[int, Ranged] = {}
        self.controls: list[list[tuple[int, int, int, int]]] = [[] for _ in range(self.num_workers)]

    def fill(self, sequence_id: int, num_tokens: int) -> None:
        """Store a new sequence, whose rows attend elsewhere."""
        self.sequences[sequence_id] = Ranged(holders=self.holders(sequence_id, 0))
        while (left := num_tokens - self.sequences[sequence_id].length) > 0:
            self.step([{sequence_id: min(left, self.range_tokens)}], attends=False)

    def holders(self, sequence_id: int, index: int) -> tuple[int, ...]:
        """Return the R-workers that hold a range."""
        home = self.place(sequence_id, index)
        return (home,) if self.copy is None else (home, self.copy(sequence_id, index))

    def chunk(self, sequence_id: int, count: int, attends: bool = True) -> Chunk:
        """Return a chunk of the next ``count`` tokens of a sequence."""
        sequence = self.sequences[sequence_id]
        reads = [(int(self.rng.choice(holders)), *rest) for holders, *rest in sequence.closed if attends]
        worker, copy = (*self.rng.permutation(sequence.holders).tolist(), -1)[:2]
        where = {"base": sequence.base, "reads": tuple(reads), "copy": copy}
        return Chunk(sequence_id, worker, sequence.length, [sequence_id] * count, attends, **where)

    def begin(self, counts: Sequence[dict[int, int]], attends: bool = True) -> list[MiniBatch]:
        """Begin a step with the next rows of sequences; ``counts``: by mini-batch and sequence."""
        listed = [[self.chunk(*each, attends) for each in part.items()] for part in counts]
        parts = [MiniBatch.sorted([MiniBatch.of(chunks)]) for chunks in listed]
        plan = ScheduledStep(tuple(parts), tuple(map(tuple, self.controls))).to_step_plan()
        self.controls = [[] for _ in range(self.num_workers)]
        self.backend.begin_step(plan)
        return parts

    def attend(self, parts: Sequence[MiniBatch], layer: int, outputs: dict[int, list[np.ndarray]]) -> None:
        """Run one layer, and append each sequence's o to ``outputs``."""
        for index, part in enumerate(parts):
            if len(part):
                self.backend.submit(index, layer, *rows_of(part, layer, self.layout))
        for index, part in enumerate(parts):
            o, row = self.backend.collect(index) if len(part) else np.zeros(0), 0
            for chunk in part:
                if chunk.attends:
                    outputs.setdefault(chunk.sequence_id, []).append(o[row : row + len(chunk.token_ids)].copy())
                    row += len(chunk.token_ids)

    def step(self, counts: Sequence[dict[int, int]], attends: bool = True) -> dict[int, list[np.ndarray]]:
        """Run a whole step; return o of each sequence in each layer."""
        outputs: dict[int, list[np.ndarray]] = {}
        parts = self.begin(counts, attends)
        for layer in range(len(self.layout.layers)):
            self.attend(parts, layer, outputs)
        self.report: StepReport = self.backend.end_step()
        for part in counts:
            for sequence_id, count in part.items():
                self.grow(sequence_id, count)
        return outputs

    def grow(self, sequence_id: int, count: int) -> None:
        """Count ``count`` more tokens. A full tail is closed: the next step forks it under a new id."""
        sequence = self.sequences[sequence_id]
        sequence.length += count
        tail = sequence.length - sequence.base
        if tail == self.range_tokens:
            index = len(sequence.closed)
            range_id = 1000 * (sequence_id + 1) + index
            for holder in sequence.holders:
                self.controls[holder] += [
                    (Verb.FORK, range_id, sequence_id, tail),
                    (Verb.RELEASE, sequence_id, 0, 0),
                ]
            sequence.closed.append((sequence.holders, range_id, sequence.base))
            sequence.base, sequence.holders = sequence.length, self.holders(sequence_id, index + 1)


@cache
def _draw(sequence_id: int, layer: int, part: int, heads: int, dim: int) -> np.ndarray:
    rng = np.random.default_rng((sequence_id, layer, part))
    return rng.standard_normal((MOST_TOKENS, heads, dim), dtype=np.float32)


def rows_of(part: MiniBatch, layer: int, layout: KVLayout) -> tuple[np.ndarray, ...]:
    """Return q, k, v of a mini-batch, which depend only on sequence, position and layer."""
    spec: Layer = layout.layers[layer]
    shapes = (
        (spec.num_heads, spec.key_head_dim),
        (spec.num_kv_heads, spec.key_head_dim),
        (spec.num_kv_heads, spec.value_head_dim),
    )
    arrays = []
    for index, shape in enumerate(shapes):
        pieces = [
            _draw(chunk.sequence_id, layer, index, *shape)[chunk.context_len :][: len(chunk.token_ids)]
            for chunk in part
            if index > 0 or chunk.attends
        ]
        arrays.append(to_wire(np.concatenate(pieces or [np.zeros((0, *shape), np.float32)]), layout.model_dtype))
    return tuple(arrays)
