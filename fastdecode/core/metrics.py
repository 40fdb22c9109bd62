"""How long a step takes on S-worker and R-workers: the S-worker's clock, records of steps, a trace of all steps."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fastdecode.core.errors import naming
from fastdecode.core.step import ScheduledStep
from fastdecode.core.types import StepReport

MODEL = "s"
"""State of the S-worker: the model computes, head and sampling included."""

WAIT = "wait"
"""State of the S-worker: it waits, since no mini-batch's attention is done."""

HOST = "host"
"""State of the S-worker: scheduling, planning, detokenizing, bookkeeping."""

S_LANE = 0

R_BUSY = "r"


class Interval(NamedTuple):
    """A period that the S-worker spent in one state, in seconds of ``time.perf_counter``.
    Mini-batch and layer are -1 if the state concerns none.
    """

    state: str
    mini_batch: int
    layer: int
    start_seconds: float
    end_seconds: float


@dataclass
class StateClock:
    """Sums the seconds that the S-worker spends in each state; also keeps every interval while ``recording``.
    ``state``: the current state. ``since``: its beginning, in seconds of ``time.perf_counter``.
    """

    recording: bool = False
    seconds: dict[str, float] = field(default_factory=lambda: {MODEL: 0.0, WAIT: 0.0, HOST: 0.0})
    intervals: list[Interval] = field(default_factory=list)
    state: str = HOST
    _mini_batch: int = -1
    _layer: int = -1
    since: float = field(default_factory=time.perf_counter)

    def enter(self, state: str, mini_batch: int = -1, layer: int = -1) -> float:
        """Change to ``state``; return the time of the change in seconds of ``time.perf_counter``."""
        now = time.perf_counter()
        self.seconds[self.state] += now - self.since
        if self.recording:
            self.intervals.append(Interval(self.state, self._mini_batch, self._layer, self.since, now))
        self.state, self._mini_batch, self._layer, self.since = state, mini_batch, layer, now
        return now

    def restart(self) -> None:
        """Set all sums to zero, and start in the host state now."""
        self.seconds = {MODEL: 0.0, WAIT: 0.0, HOST: 0.0}
        self.state, self._mini_batch, self._layer, self.since = HOST, -1, -1, time.perf_counter()

    def snapshot(self) -> dict[str, float]:
        """Return the seconds spent in each state since ``restart``."""
        self.enter(self.state, self._mini_batch, self._layer)
        return dict(self.seconds)


class Pool(NamedTuple):
    """The R-workers and copies after a step. ``num_workers``: R-workers that are present.
    ``once``, ``twice``: numbers of sequences with one copy, and with two copies.
    """

    num_workers: int = 1
    once: int = 0
    twice: int = 0


ONE_WORKER = Pool()


@dataclass
class PoolChanges:
    """Counts of changes since the start: R-workers, and copies of sequences.
    ``joined``, ``left``, ``lost``: R-workers. ``moved``: sequences or segments that moved to another R-worker;
    ``doubled``: those that got a second copy. ``audited``: rows that audits compared. ``faulty``: names of R-workers
    that audits found at fault. ``undecided``: audits that found a difference but not the R-worker that caused it.
    """

    joined: int = 0
    left: int = 0
    lost: int = 0
    moved: int = 0
    doubled: int = 0
    audited: int = 0
    faulty: tuple[str, ...] = ()
    undecided: int = 0


@dataclass(frozen=True)
class StepRecord:
    """One step's times and counts. ``wall_seconds`` is ``s_seconds`` + ``wait_seconds`` + ``host_seconds``.
    ``kv_loads`` (attended KV tokens), ``r_seconds`` and ``transfer_seconds`` have an entry per R-worker. A lost
    R-worker keeps its entry until a new one takes its index. ``num_starts``: requests that started for the first time.
    ``num_prompt_tokens``: prompt tokens among ``num_tokens``. ``pool``: the pool after the step.
    """

    is_decode: bool
    overlapped: bool
    num_tokens: int
    num_output_tokens: int
    kv_loads: tuple[int, ...]
    wall_seconds: float
    s_seconds: float
    wait_seconds: float
    host_seconds: float
    r_seconds: tuple[float, ...]
    transfer_seconds: tuple[float, ...]
    kv_bytes_read: int
    lost_workers: int = 0
    num_starts: int = 0
    num_prompt_tokens: int = 0
    pool: Pool = ONE_WORKER

    @property
    def kv_load(self) -> int:
        """The number of KV tokens that all R-workers together attended to."""
        return sum(self.kv_loads)


def step_record(
    step: ScheduledStep,
    report: StepReport,
    seconds: dict[str, float],
    num_output_tokens: int,
    overlapped: bool,
    pool: Pool,
) -> StepRecord:
    """Return the record of a step from the scheduler's plan, the R-workers' report and the clock's seconds."""
    return StepRecord(
        is_decode=step.is_decode,
        overlapped=overlapped,
        num_tokens=step.num_tokens,
        num_output_tokens=num_output_tokens,
        kv_loads=tuple(step.kv_loads),
        wall_seconds=sum(seconds.values()),
        s_seconds=seconds[MODEL],
        wait_seconds=seconds[WAIT],
        host_seconds=seconds[HOST],
        r_seconds=tuple(float(np.sum(worker.busy_end - worker.busy_start)) for worker in report.workers),
        transfer_seconds=tuple(worker.transfer_seconds for worker in report.workers),
        kv_bytes_read=sum(worker.bytes_read for worker in report.workers),
        lost_workers=len(report.lost),
        num_starts=step.num_starts,
        num_prompt_tokens=step.num_prompt_rows,
        pool=pool,
    )


class Event(NamedTuple):
    """A period of one lane of a trace in one state, in seconds of ``time.perf_counter``.
    Lane 0 is the S-worker, lane 1 + i is R-worker i.
    """

    lane: int
    interval: Interval


class Tracer:
    """Collects the events of every step; ``write`` saves them in Chrome's trace format."""

    def __init__(self) -> None:
        self.steps: list[list[Event]] = []

    def add(self, intervals: Sequence[Interval], report: StepReport) -> None:
        """Add a step: the S-worker's intervals, and the R-workers' busy times from ``report``."""
        events = [Event(S_LANE, interval) for interval in intervals]
        for index, worker in enumerate(report.workers):
            for mini_batch, layer in np.argwhere(worker.busy_end > 0).tolist():
                start, end = worker.busy_start[mini_batch, layer], worker.busy_end[mini_batch, layer]
                events.append(Event(1 + index, Interval(R_BUSY, mini_batch, layer, float(start), float(end))))
        self.steps.append(events)

    def write(self, path: str) -> None:
        """Write all steps to the file ``path``. Raise OSError if that fails."""
        events = [event for step in self.steps for event in step]
        lanes = sorted({event.lane for event in events})
        names = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": lane, "args": {"name": lane_name(lane)}}
            for lane in lanes
        ]
        trace = {"traceEvents": names + [_chrome_event(event) for event in events], "displayTimeUnit": "ms"}
        with naming(path):
            Path(path).write_text(json.dumps(trace), encoding="utf-8")


def lane_name(lane: int) -> str:
    """Return the name under which traces and pictures show ``lane``."""
    return "S-worker" if lane == S_LANE else f"R-worker {lane - 1}"


def mini_batch_name(mini_batch: int) -> str:
    """Return the letter that names a mini-batch in traces: A, B, C, …"""
    return chr(ord("A") + mini_batch % 26)


def _chrome_event(event: Event) -> dict:
    interval = event.interval
    where = "" if interval.mini_batch < 0 else f" {mini_batch_name(interval.mini_batch)}{interval.layer}"
    return {
        "name": interval.state + where,
        "cat": interval.state,
        "ph": "X",
        "pid": 0,
        "tid": event.lane,
        "ts": interval.start_seconds * 1e6,
        "dur": (interval.end_seconds - interval.start_seconds) * 1e6,
        "args": {"mini_batch": interval.mini_batch, "layer": interval.layer},
    }
