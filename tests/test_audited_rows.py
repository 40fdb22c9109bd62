"""The choice of audited rows: every sequence and layer in turn, as many as asked, and checked by its second holder."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from fastdecode.cluster.pool.audited_rows import AuditedRow, RowChooser
from fastdecode.core.auditing import AuditMode
from fastdecode.core.routes import routes_of_spans
from fastdecode.core.types import CONTROL, SPAN, SpanMode, StepPlan, WorkerPlan

LAYERS = (0, 2, 3)
NUM_SEQUENCES = 5


def decodes(step: int, num_rows: int = 1) -> StepPlan:
    """Return a step of five sequences on two R-workers; the second copies of the first one's are on the second."""
    first = [(each, 100 + step * num_rows, num_rows, SpanMode.ATTEND) for each in range(3)]
    second = [(each, 100 + step * num_rows, num_rows, SpanMode.ATTEND) for each in range(3, NUM_SEQUENCES)]
    copies = [(each, context, count, SpanMode.APPEND) for each, context, count, _ in first]
    none = np.zeros(0, CONTROL)
    return StepPlan((WorkerPlan(none, (np.array(first, SPAN),)), WorkerPlan(none, (np.array(second + copies, SPAN),))))


def chosen(chooser: RowChooser, plan: StepPlan) -> list[AuditedRow]:
    return chooser.choose(plan, routes_of_spans(plan.workers))


@pytest.mark.parametrize("fraction", [0.01, 0.2, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_each_sequence_and_layer_has_its_turn(fraction: float, seed: int) -> None:
    """So a flipped bit in one of them is read by one of as many audited rows as there are pairs."""
    chooser, cells, num_steps = RowChooser(fraction, LAYERS, seed), [], int(120 / fraction / 15)
    for step in range(num_steps):
        cells += [(row.question.sequence_id, row.question.layer) for row in chosen(chooser, decodes(step))]
    whole = NUM_SEQUENCES * len(LAYERS)
    assert abs(len(cells) - fraction * num_steps * whole) <= 1
    for start in range(len(cells) - whole):
        assert set(Counter(cells[start : start + whole]).values()) == {1}


def test_a_row_names_its_query_its_answer_and_its_checker() -> None:
    chooser = RowChooser(1.0, LAYERS, 0)
    rows = [row for step in range(4) for row in chosen(chooser, decodes(step, num_rows=2))]
    assert len(rows) == pytest.approx(4 * 2 * NUM_SEQUENCES * len(LAYERS), abs=1)
    for row in rows:
        asked, place = row.question, row.question.position % 2
        assert asked.mode is AuditMode.ATTEND and asked.position - place + 2 == asked.num_tokens
        assert row.worker == int(asked.sequence_id > 2) and row.checker == (1 if row.worker == 0 else -1)
        assert row.q_row == 2 * asked.sequence_id + place and row.out == slice(row.q_row, row.q_row + 1)


def test_sequences_that_end_are_forgotten() -> None:
    chooser = RowChooser(1.0, LAYERS, 0)
    for number in range(400):
        spans = np.array([(number, 10, 1, SpanMode.ATTEND)], SPAN)
        chosen(chooser, StepPlan((WorkerPlan(np.zeros(0, CONTROL), (spans,)),)))
    assert len(chooser._turns) < 100
