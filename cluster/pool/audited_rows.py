"""Chooses the rows of each step that are audited."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fastdecode.core.auditing import AuditMode, AuditQuestion, num_nodes
from fastdecode.core.routes import count_rows
from fastdecode.core.types import SPLIT_TOKENS, MiniBatchRoutes, SpanMode, StepPlan


@dataclass(eq=False)
class AuditedRow:
    """A row of a step in one layer to audit: the R-worker ``worker`` computes it, and its answer is checked.

    ``q_row``: the row's index in the mini-batch's q. ``out``: the answer's rows in o, or in the R-worker's partial
    results. ``checker``: another R-worker with the same tokens; -1 if there is none. ``query``: the row of q, set when
    the pool sends it. ``given``: the answer (uint8), set when it arrives.
    """

    worker: int
    mini_batch: int
    question: AuditQuestion
    q_row: int
    out: slice
    checker: int
    query: np.ndarray | None = None
    given: np.ndarray | None = None


class RowChooser:
    """Chooses at random a fraction of all (row, layer) pairs that R-workers compute.

    The choice goes in rounds, so that every sequence (or segment) is audited in every layer. A round audits each
    sequence once, in that sequence's next layer. A sequence with r rows in a step is audited r times a round.
    """

    def __init__(self, fraction: float, layers: Sequence[int], seed: int) -> None:
        """``layers``: the layers that can be audited."""
        self._random = np.random.default_rng(seed)
        self._fraction, self._layers = fraction, self._random.permutation(layers).tolist()
        self._owed, self._now = float(self._random.random()), 0.0
        self._turns: dict[int, tuple[float, int]] = {}

    def choose(self, plan: StepPlan, routes: Sequence[MiniBatchRoutes]) -> list[AuditedRow]:
        """Return the audited rows of the step. ``routes``: the routes of each mini-batch."""
        rows = sum(count_rows(route.q_rows) for each in routes for route in each.workers)
        self._owed += self._fraction * rows * len(self._layers)
        count = int(self._owed)
        self._owed -= count
        if not count:
            return []
        queue = list(self._candidates(plan))
        heapq.heapify(queue)
        chosen = []
        for _ in range(count):
            turn, sequence_id, worker, mini_batch, span, num_rows = queue[0]
            number = self._turns[sequence_id][1]
            layer = self._layers[number % len(self._layers)]
            row = int(self._random.integers(num_rows))
            chosen.append(_audited(plan, routes, worker, mini_batch, span, row, layer))
            self._now = max(self._now, turn)
            self._turns[sequence_id] = turn + 1 / num_rows, number + 1
            heapq.heapreplace(queue, (turn + 1 / num_rows, *queue[0][1:]))
        return chosen

    def _candidates(self, plan: StepPlan) -> list[tuple[float, int, int, int, int, int]]:
        """Return (time of its next audit, sequence id, R-worker, mini-batch, index, number of rows) of each span."""
        found = []
        for worker, part in enumerate(plan.workers):
            for number, spans in enumerate(part.mini_batches):
                for index, (sequence_id, _, num_rows, mode) in enumerate(spans.tolist()):
                    if mode != SpanMode.APPEND:
                        found.append((self._turn(sequence_id), sequence_id, worker, number, index, num_rows))
        if len(self._turns) > 2 * len(found) + 64:
            present = {each[1] for each in found}
            self._turns = {each: turn for each, turn in self._turns.items() if each in present}
        return found

    def _turn(self, sequence_id: int) -> float:
        """Return the time of the sequence's next audit, in rounds. A new sequence gets a random time and layer."""
        if sequence_id not in self._turns:
            layer = int(self._random.integers(len(self._layers)))
            self._turns[sequence_id] = self._now + float(self._random.random()), layer
        return max(self._turns[sequence_id][0], self._now - 1)


def _audited(
    plan: StepPlan, routes: Sequence[MiniBatchRoutes], worker: int, mini_batch: int, index: int, row: int, layer: int
) -> AuditedRow:
    """Return the ``AuditedRow`` in ``layer`` for row ``row`` of ``worker``'s span ``index`` in ``mini_batch``."""
    spans, route = plan.workers[worker].mini_batches[mini_batch], routes[mini_batch].workers[worker]
    span, before = spans[index], spans[:index]
    sequence_id, context_len, num_rows = (int(span[name]) for name in ("sequence_id", "context_len", "num_rows"))
    mode, num_tokens = AuditMode(int(span["mode"])), context_len + num_rows
    place = int(before["num_rows"].sum()) + row
    q_row = route.q_rows.start + place if isinstance(route.q_rows, slice) else int(route.q_rows[place])
    if mode is AuditMode.ATTEND:
        first = route.o_rows.start + int(before["num_rows"][before["mode"] == SpanMode.ATTEND].sum()) + row
        out = slice(first, first + 1)
    else:
        width = num_nodes(num_tokens) if mode is AuditMode.PARTIAL else 1
        first = sum(_num_partials(*each) for each in before.tolist())
        out = slice(first + row * width, first + row * width + width)
    if mode is AuditMode.READ:
        parts = routes[mini_batch].merge.parts
        num_tokens = int(parts["num_splits"][(parts["worker"] == worker) & (parts["row"] == first)][0]) * SPLIT_TOKENS
    question = AuditQuestion(mode, sequence_id, layer, context_len + row, num_tokens)
    return AuditedRow(worker, mini_batch, question, q_row, out, _checker(plan, worker, mini_batch, sequence_id))


def _num_partials(sequence_id: int, context_len: int, num_rows: int, mode: int) -> int:
    """Return the number of partial results of a span."""
    if mode == SpanMode.READ:
        return num_rows
    return num_rows * num_nodes(context_len + num_rows) if mode == SpanMode.PARTIAL else 0


def _checker(plan: StepPlan, worker: int, mini_batch: int, sequence_id: int) -> int:
    """Return the R-worker that stores a second copy of ``sequence_id`` in this step; -1 if there is none."""
    for index, part in enumerate(plan.workers):
        spans = part.mini_batches[mini_batch]
        if index != worker and (spans["mode"][spans["sequence_id"] == sequence_id] == SpanMode.APPEND).any():
            return index
    return -1
