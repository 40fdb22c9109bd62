"""Offline throughput: run a workload through an engine and keep what every step and request did."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastdecode.bench.workload import WorkItem
from fastdecode.metrics import StepRecord
from fastdecode.outputs import RequestOutput
from fastdecode.sampling_params import SamplingParams
from fastdecode.scheduler import SchedulerStatistics

if TYPE_CHECKING:  # a simulation reports as a run does, without torch
    from fastdecode.engine import LLMEngine

OVERLAP_BLOCK_STEPS = 4
"""Steps between changes of mode when overlap is measured: A B A B within one run."""


@dataclass
class ThroughputRun:
    """Everything a run left behind. ``elapsed_seconds`` is from its start to the last token."""

    elapsed_seconds: float = 0.0
    outputs: list[RequestOutput] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    statistics: SchedulerStatistics = field(default_factory=SchedulerStatistics)
    kv_load_limit: int | None = None


def run_throughput(
    engine: LLMEngine,
    items: Sequence[WorkItem],
    measure_overlap: bool = False,
    on_finished: Callable[[RequestOutput], None] = lambda output: None,
    run: ThroughputRun | None = None,
) -> ThroughputRun:
    """Run ``items`` greedily, exactly ``output_len`` tokens each, adding each at its arrival time.

    ``run`` may be handed in so that an interrupted benchmark still has what was done.
    """
    run = run or ThroughputRun()
    engine.on_step = run.steps.append
    before = engine.scheduler.statistics
    engine.clock.restart()
    start = time.perf_counter()
    waiting = deque(sorted(enumerate(items), key=lambda pair: pair[1].arrival_seconds))
    try:
        while waiting or engine.has_unfinished_requests():
            _add_arrived(engine, waiting, start)
            if not engine.has_unfinished_requests():
                time.sleep(max(0.0, waiting[0][1].arrival_seconds - (time.perf_counter() - start)))
                engine.clock.restart()
                continue
            engine.overlap = not measure_overlap or len(run.steps) // OVERLAP_BLOCK_STEPS % 2 == 0
            for output in engine.step():
                if output.finished:
                    run.outputs.append(output)
                    on_finished(output)
    finally:
        run.elapsed_seconds = time.perf_counter() - start
        run.statistics = engine.scheduler.statistics.since(before)
        run.kv_load_limit = engine.scheduler.kv_load_limit
        engine.on_step, engine.overlap = None, True
    return run


def warm_up(engine: LLMEngine, items: Sequence[WorkItem]) -> None:
    """A short run of the same shapes, so that first-use costs (libraries, page faults) stay out of the figures."""
    run_throughput(engine, [WorkItem(item.prompt_token_ids, min(2, item.output_len)) for item in items[:2]])
    engine.reset_prefix_cache()


def _add_arrived(engine: LLMEngine, waiting: deque[tuple[int, WorkItem]], start_seconds: float) -> None:
    """Add what has arrived by now; its time to first token counts from its arrival, not from this moment."""
    now_seconds = time.perf_counter() - start_seconds
    while waiting and waiting[0][1].arrival_seconds <= now_seconds:
        index, item = waiting.popleft()
        params = SamplingParams(
            temperature=0, max_tokens=item.output_len, min_tokens=item.output_len, ignore_eos=True, detokenize=False
        )
        arrival = start_seconds + item.arrival_seconds
        engine.add_request(f"bench-{index}", {"prompt_token_ids": item.prompt_token_ids}, params, arrival)
