"""Chooses the rows of each step that are audited."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
        spans, checkers = _spans_of(plan)
        self._forget_others({each.sequence_id for each in spans}, 2 * len(spans) + 64)
        queue = [(self._turn(each.sequence_id), each.sequence_id, index) for index, each in enumerate(spans)]
        heapq.heapify(queue)
        chosen = []
        for _ in range(count):
            turn, sequence_id, index = queue[0]
            span, number = spans[index], self._turns[sequence_id][1]
            row = int(self._random.integers(span.num_rows))
            layer = self._layers[number % len(self._layers)]
            chosen.append(_audited(span, row, layer, routes[span.mini_batch], checkers))
            self._now = max(self._now, turn)
            self._turns[sequence_id] = turn + 1 / span.num_rows, number + 1
            heapq.heapreplace(queue, (turn + 1 / span.num_rows, sequence_id, index))
        return chosen

    def _forget_others(self, present: set[int], most: int) -> None:
        """Forget the turns of sequences that are not ``present``, if there are more than ``most`` turns."""
        if len(self._turns) > most:
            self._turns = {each: turn for each, turn in self._turns.items() if each in present}

    def _turn(self, sequence_id: int) -> float:
        """Return the time of the sequence's next audit, in rounds. A new sequence gets a random time and layer."""
        if sequence_id not in self._turns:
            layer = int(self._random.integers(len(self._layers)))
            self._turns[sequence_id] = self._now + float(self._random.random()), layer
        return max(self._turns[sequence_id][0], self._now - 1)


class _Span(NamedTuple):
    """A span of rows that attend on R-worker ``worker``. ``first_q``: the R-worker's query rows before the span.

    ``first_answer``: its rows of o before the span, or its partial results.
    """

    worker: int
    mini_batch: int
    sequence_id: int
    context_len: int
    num_rows: int
    mode: int
    first_q: int
    first_answer: int


_Checkers = dict[tuple[int, int], list[int]]
"""The R-workers that store tokens of a sequence without attending, by mini-batch and sequence id."""


def _spans_of(plan: StepPlan) -> tuple[list[_Span], _Checkers]:
    """Return the spans that attend in a step, and the R-workers that only store the others."""
    found: list[_Span] = []
    checkers: _Checkers = {}
    for worker, part in enumerate(plan.workers):
        for number, spans in enumerate(part.mini_batches):
            first_q = num_outputs = num_partials = 0
            for sequence_id, context_len, num_rows, mode in spans.tolist():
                if mode == SpanMode.APPEND:
                    checkers.setdefault((number, sequence_id), []).append(worker)
                    continue
                first_answer = num_outputs if mode == SpanMode.ATTEND else num_partials
                found.append(_Span(worker, number, sequence_id, context_len, num_rows, mode, first_q, first_answer))
                first_q += num_rows
                num_outputs += num_rows if mode == SpanMode.ATTEND else 0
                num_partials += _num_partials(context_len, num_rows, mode)
    return found, checkers


def _audited(span: _Span, row: int, layer: int, routes: MiniBatchRoutes, checkers: _Checkers) -> AuditedRow:
    """Return the ``AuditedRow`` in ``layer`` for row ``row`` of ``span``. ``routes``: of the span's mini-batch."""
    route, mode, num_tokens = routes.workers[span.worker], AuditMode(span.mode), span.context_len + span.num_rows
    place = span.first_q + row
    q_row = route.q_rows.start + place if isinstance(route.q_rows, slice) else int(route.q_rows[place])
    width = num_nodes(num_tokens) if mode is AuditMode.PARTIAL else 1
    first = span.first_answer + row * width + (route.o_rows.start if mode is AuditMode.ATTEND else 0)
    if mode is AuditMode.READ:
        parts = routes.merge.parts
        of_span = (parts["worker"] == span.worker) & (parts["row"] == span.first_answer)
        num_tokens = int(parts["num_splits"][of_span][0]) * SPLIT_TOKENS
    others = [each for each in checkers.get((span.mini_batch, span.sequence_id), ()) if each != span.worker]
    question = AuditQuestion(mode, span.sequence_id, layer, span.context_len + row, num_tokens)
    checker = others[0] if others else -1
    return AuditedRow(span.worker, span.mini_batch, question, q_row, slice(first, first + width), checker)


def _num_partials(context_len: int, num_rows: int, mode: int) -> int:
    """Return the number of partial results of a span."""
    if mode == SpanMode.READ:
        return num_rows
    return num_rows * num_nodes(context_len + num_rows) if mode == SpanMode.PARTIAL else 0
