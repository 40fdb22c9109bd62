"""Chrome trace events of a run: one lane for the S-worker, one per R-worker (open in chrome://tracing or Perfetto)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fastdecode.clock import Span
from fastdecode.types import StepReport

S_LANE = 0


class Tracer:
    """Collects the spans of every step; ``write`` makes the file."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.events: list[dict] = []
        self._lanes = {S_LANE: "S-worker"}

    def add(self, spans: Sequence[Span], report: StepReport) -> None:
        """One step: the S-worker's stays in each state and the R-workers' busy times, seconds of ``perf_counter``."""
        for span in spans:
            self._event(S_LANE, span.state, span.mini_batch, span.layer, span.start_seconds, span.end_seconds)
        for index, worker in enumerate(report.workers):
            self._lanes[index + 1] = f"R-worker {index}"
            for mini_batch, layer in np.argwhere(worker.busy_end > 0).tolist():
                start, end = worker.busy_start[mini_batch, layer], worker.busy_end[mini_batch, layer]
                self._event(index + 1, "r", mini_batch, layer, float(start), float(end))

    def write(self) -> None:
        """Write the file; may be called again."""
        names = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": lane, "args": {"name": name}}
            for lane, name in self._lanes.items()
        ]
        self.path.write_text(json.dumps({"traceEvents": names + self.events, "displayTimeUnit": "ms"}))

    def _event(self, lane: int, state: str, mini_batch: int, layer: int, start: float, end: float) -> None:
        """A complete ("X") event; times in microseconds as the format wants."""
        self.events.append(
            {
                "name": state if mini_batch < 0 else f"{state} {'ABCDEFGH'[mini_batch % 8]}{layer}",
                "cat": state,
                "ph": "X",
                "pid": 0,
                "tid": lane,
                "ts": start * 1e6,
                "dur": (end - start) * 1e6,
                "args": {"mini_batch": mini_batch, "layer": layer},
            }
        )
