"""The server's view of its engine: the last steps, the R-workers, the queue. It is plain data, made after each step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from fastdecode.api.outputs import RequestOutput
from fastdecode.core.metrics import Event, StepRecord, Tracer
from fastdecode.engine.engine import LLMEngine
from fastdecode.server.engine_state import EngineState, RWorkerState, SessionState, TimedStep
from fastdecode.server.prometheus import Metrics

MOST_STEPS = 1000


class EngineWatch:
    """The engine's state. The engine's thread writes it after each step; the event loop may read it at any time.

    ``steps``: the last steps, oldest first. ``timeline``: the workers' ``metrics.Event``s in the last step, kept only
    while the event loop sets ``watched``. ``looking``: the last output of a request that asks for attention sources.
    """

    def __init__(self, model_name: str, most_steps: int = MOST_STEPS) -> None:
        self.metrics = Metrics(model_name)
        self.steps: deque[TimedStep] = deque(maxlen=most_steps)
        self.state = EngineState(time.perf_counter())
        self.timeline: list[Event] = []
        self.watched = False
        self.looking: RequestOutput | None = None
        self._new: list[StepRecord] = []

    def attach(self, engine: LLMEngine) -> None:
        """Start watching ``engine``. Call this in the engine's thread before its first step."""
        engine.on_step = self._new.append
        self.after_step(engine, [])

    def after_step(self, engine: LLMEngine, outputs: Sequence[RequestOutput]) -> None:
        """Update the state in the engine's thread, after each step and every second while the engine is idle."""
        now = time.perf_counter()
        records, self._new[:] = list(self._new), []
        self.steps.extend(TimedStep(now, record) for record in records)
        self.state = read_state(engine, records[-1] if records else None, now)
        self.looking = next((each for each in outputs if each.outputs[0].all_sources), self.looking)
        self.metrics.after_step(self.state, records, outputs, engine.config.enable_prefix_caching)
        self._follow_timeline(engine)

    def _follow_timeline(self, engine: LLMEngine) -> None:
        """Record the timeline only while a client looks, since it costs time, and a full trace costs memory."""
        tracer = engine.world.tracer
        if tracer and tracer.steps:
            self.timeline = tracer.steps[-1]
            if not engine.config.trace:
                tracer.steps.clear()
        if not engine.config.trace and self.watched != engine.world.clock.recording:
            engine.world.clock.recording = self.watched
            engine.world.clock.intervals.clear()
            engine.world.tracer = Tracer() if self.watched else None


def read_state(engine: LLMEngine, record: StepRecord | None, now: float) -> EngineState:
    """Return ``engine``'s state at ``now``, with the times in ``record``, if any. Call this in the engine's thread."""
    scheduler, known = engine.scheduler, engine.scheduler.snapshot(with_sequences=False)
    counted, is_limited = scheduler.statistics, scheduler.load_limit.tokens is not None
    limits = scheduler.load_limit.of_workers.tolist() if is_limited else [0.0] * len(engine.r_workers)
    parked = engine.parking.parked_bytes if engine.parking else {}
    r_workers = [
        RWorkerState(
            info.name,
            present=not worker.is_gone,
            draining=worker.is_draining,
            num_sequences=worker.num_sequences,
            kv_load_limit=int(limit) if is_limited else None,
            blocks_used=worker.used,
            num_blocks=worker.num_blocks,
            parked_bytes=parked.get(worker.index),
            faulty=worker.is_gone and info.name in engine.membership.changes.faulty,
        )
        for info, worker, limit in zip(engine.r_workers, known.r_workers, limits, strict=True)
    ]
    if record:
        r_workers = [_with_times(each, record, index) for index, each in enumerate(r_workers)]
    used, total = sum(each.blocks_used for each in r_workers), sum(each.num_blocks for each in r_workers)
    return EngineState(
        now, known.num_running, known.num_waiting, used / total if total else 0.0,
        counted.preemptions, counted.prefix_hit_tokens, tuple(r_workers), counted.drafts,
        known.pool, replace(engine.membership.changes), engine.trouble, counted.woken_tokens, counted.failed_wakes,
        session_of(engine),
    )  # fmt: skip


def session_of(engine: LLMEngine) -> SessionState | None:
    """Return the state of the journal's session; None if ``engine`` has no journal."""
    if engine.config.journal is None and engine.config.session is None:
        return None
    epoch, journal = max((info.epoch for info in engine.r_workers), default=0), engine.journal
    return SessionState(engine.config.session or "", epoch, journal.num_bytes, journal.write_seconds)


def _with_times(worker: RWorkerState, record: StepRecord, index: int) -> RWorkerState:
    if index >= len(record.r_seconds):
        return worker
    kv_load = record.kv_loads[index] if index < len(record.kv_loads) else 0
    return replace(
        worker,
        kv_load=kv_load,
        busy_seconds=record.r_seconds[index],
        transfer_seconds=record.transfer_seconds[index],
    )
