"""What the S-worker and every R-worker did when, as Chrome trace events (chrome://tracing, Perfetto)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fastdecode.clock import Span
from fastdecode.types import StepReport

S_LANE = 0
R_BUSY = "r"


class Event(NamedTuple):
    """A stay of one lane in one state: lane 0 is the S-worker, 1 + i is R-worker i; seconds of ``perf_counter``."""

    lane: int
    span: Span


class Tracer:
    """Collects the events of every step; ``write`` makes the file of Chrome's format."""

    def __init__(self) -> None:
        self.steps: list[list[Event]] = []

    def add(self, spans: Sequence[Span], report: StepReport) -> None:
        """One step: the S-worker's stays in each state and the R-workers' busy times."""
        events = [Event(S_LANE, span) for span in spans]
        for index, worker in enumerate(report.workers):
            for mini_batch, layer in np.argwhere(worker.busy_end > 0).tolist():
                start, end = worker.busy_start[mini_batch, layer], worker.busy_end[mini_batch, layer]
                events.append(Event(1 + index, Span(R_BUSY, mini_batch, layer, float(start), float(end))))
        self.steps.append(events)

    def write(self, path: str) -> None:
        """Write all steps; OSError when the file cannot be written."""
        events = [event for step in self.steps for event in step]
        lanes = sorted({event.lane for event in events})
        names = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": lane, "args": {"name": lane_name(lane)}}
            for lane in lanes
        ]
        trace = {"traceEvents": names + [_chrome_event(event) for event in events], "displayTimeUnit": "ms"}
        Path(path).write_text(json.dumps(trace))


def lane_name(lane: int) -> str:
    """How a lane is called in pictures."""
    return "S-worker" if lane == S_LANE else f"R-worker {lane - 1}"


def mini_batch_name(mini_batch: int) -> str:
    """A, B, C, …"""
    return chr(ord("A") + mini_batch % 26)


def _chrome_event(event: Event) -> dict:
    """A complete ("X") event; times in microseconds as the format wants."""
    span = event.span
    where = "" if span.mini_batch < 0 else f" {mini_batch_name(span.mini_batch)}{span.layer}"
    return {
        "name": span.state + where,
        "cat": span.state,
        "ph": "X",
        "pid": 0,
        "tid": event.lane,
        "ts": span.start_seconds * 1e6,
        "dur": (span.end_seconds - span.start_seconds) * 1e6,
        "args": {"mini_batch": span.mini_batch, "layer": span.layer},
    }
