"""Copies recurrent states between R-workers before a step in which sequences go on in new segments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import methodcaller
from typing import Any

import numpy as np

from fastdecode.core.types import CONTROL, SPAN, Handover, StepPlan, WorkerPlan


def hand_over(
    plan: StepPlan,
    send: Callable[[Sequence[WorkerPlan]], None],
    ask: Callable[[int, Callable[[Any], Any]], Any],
) -> tuple[WorkerPlan, ...]:
    """Send the controls of ``plan``, then carry out its handovers; return each R-worker's part without controls.

    The controls come first, since they free the blocks that states need. ``send`` sends each R-worker its part of a
    step, and waits until all have begun the step. ``ask`` calls a function with the R-worker of an index, and returns
    the result; None if the R-worker is lost.
    """
    no_rows = np.zeros(0, SPAN)
    send([replace(each, mini_batches=(no_rows,) * len(each.mini_batches)) for each in plan.workers])
    for worker in range(len(plan.workers)):
        ask(worker, methodcaller("abandon_step"))  # this step has no rows, and its controls stay
    for each in plan.handovers:
        _copy_state(each, ask)
    return tuple(replace(each, controls=np.zeros(0, CONTROL)) for each in plan.workers)


def _copy_state(handover: Handover, ask: Callable[[int, Callable[[Any], Any]], Any]) -> None:
    """Copy the state of ``handover``, unless an R-worker is lost: then the sequence is recomputed anyway."""
    source, source_id, num_tokens, target, cache_id, start = handover
    state = ask(source, methodcaller("export", source_id, num_tokens, 0))
    if state is not None:
        ask(target, methodcaller("import_", cache_id, 0, state, start))
