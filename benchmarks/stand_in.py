"""R-workers that only take time: they answer with zeros after a given delay, one call after another."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from fastdecode.core.dtypes import WIRE_DTYPE
from fastdecode.core.errors import WorkerLostError
from fastdecode.core.types import RWorkerInfo, StepPlan, StepReport, WorkerReport
from fastdecode.kinds.layout import KVLayout
from fastdecode.perfmodel.lab.measure.decode_rig import InstantBackend
from fastdecode.perfmodel.lab.simulate import Timeline, WorkerEvent

TIMER_SECONDS = 2e-4
NUM_BLOCKS = 1 << 24


class StandInBackend(InstantBackend):
    """An ``AttentionBackend`` whose stand-in R-workers use no core.
    Each R-worker is busy with a call for ``call_seconds``, plus ``seconds_per_token`` for every attended cached token.
    It begins a call when the last one is done. The result is ready when all R-workers are done.
    """

    def __init__(
        self, call_seconds: float = 0.0, block_size: int = 32, num_workers: int = 1, seconds_per_token: float = 0.0
    ) -> None:
        super().__init__(block_size)
        self.call_seconds = call_seconds
        self.num_workers = num_workers
        self.seconds_per_token = seconds_per_token

    def open(self, layout: KVLayout) -> list[RWorkerInfo]:
        self.layout = layout
        self._info = RWorkerInfo("stand-in", NUM_BLOCKS, self._block_size, 1, "none", own_cores=True)
        return [self._info] * self.num_workers

    def begin_step(self, plan: StepPlan) -> None:
        tokens = [[_attended(spans) for spans in worker.mini_batches] for worker in plan.workers]
        self._tokens = np.array(tokens, np.float64)
        self._end: dict[int, float] = {}
        self._rows: dict[int, np.ndarray] = {}
        self._free_at = np.zeros(self.num_workers)
        self._busy = np.zeros((2, *self._tokens.shape, len(self.layout.layers)))

    def submit(self, mini_batch: int, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        tokens = self._tokens[:, mini_batch]
        start = np.maximum(time.perf_counter(), self._free_at)
        end = start + (self.call_seconds + self.seconds_per_token * tokens) * (tokens > 0)
        self._free_at = end
        self._end[mini_batch] = float(end.max())
        self._busy[:, :, mini_batch, layer] = np.where(tokens > 0, (start, end), 0.0)
        shape = (len(q), self.layout.layers[layer].num_heads, self.layout.layers[layer].value_head_dim)
        self._rows[mini_batch] = np.zeros(shape, WIRE_DTYPE[self.layout.model_dtype])

    def ready(self, mini_batch: int) -> bool:
        return time.perf_counter() >= self._end[mini_batch]

    def collect(self, mini_batch: int) -> np.ndarray:
        while (left := self._end[mini_batch] - time.perf_counter()) > 0:
            time.sleep(max(0.0, left - TIMER_SECONDS))  # Busy-wait for the rest: timers fire late.
        return self._rows[mini_batch]

    def end_step(self) -> StepReport:
        start, end = self._busy
        return StepReport(tuple(WorkerReport(*times, 0.0, 0, NUM_BLOCKS) for times in zip(start, end, strict=True)))


def _attended(spans: np.ndarray) -> int:
    """Return how many cached tokens the SPAN records of a mini-batch attend to on one R-worker."""
    return int(((spans["context_len"] + spans["num_rows"]) * (spans["mode"] > 0)).sum())


class MortalStandIns(StandInBackend):
    """Stand-in R-workers that are lost, join, drain and become slow at the times of ``events``.
    Copying a cached token takes ``seconds_per_moved_token``. ``moving_seconds``: time of all copies; ``moved_tokens``:
    their tokens. Each stand-in has a fixed number; one that joins takes any vacant index.
    """

    def __init__(self, num_workers: int, seconds_per_token: float, seconds_per_moved_token: float) -> None:
        super().__init__(0.0, num_workers=num_workers, seconds_per_token=seconds_per_token)
        self.seconds_per_moved_token = seconds_per_moved_token
        self._machines: list[int | None] = list(range(num_workers))
        self.begin([])

    def begin(self, events: list[WorkerEvent]) -> None:
        """Start the clock of ``events``, whose times count from now, with all R-workers at their initial speed."""
        self._timeline, self._began = Timeline(events), time.perf_counter()
        self.moving_seconds, self.moved_tokens = 0.0, 0
        self._slowness: dict[int, float] = {}
        self._joining: list[int] = []
        self._lost: list[int] = []
        self._leaving: set[int] = set()

    def begin_step(self, plan: StepPlan) -> None:
        self._happen()
        self.num_workers = len(plan.workers)
        super().begin_step(plan)
        factors = [0.0 if each is None else self._slowness.get(each, 1.0) for each in self._machines]
        self._tokens *= np.array(factors)[:, None]

    def submit(self, mini_batch: int, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        self._happen()
        super().submit(mini_batch, layer, q, k, v)

    def end_step(self) -> StepReport:
        self._happen()
        lost, self._lost = tuple(self._lost), []
        return StepReport(super().end_step().workers, lost, tuple(self._leaving))

    def export(self, worker: int, sequence_id: int, start: int = 0, num_tokens: int | None = None) -> np.ndarray:
        self._check(worker)
        return np.zeros(0, np.uint8)

    def import_(self, worker: int, sequence_id: int, num_tokens: int, data: np.ndarray, start: int = 0) -> None:
        start = time.perf_counter()
        time.sleep(num_tokens * self.seconds_per_moved_token)
        self.moving_seconds += time.perf_counter() - start
        self.moved_tokens += num_tokens
        self._check(worker)

    def admit(self, vacant: Sequence[int] = ()) -> dict[int, RWorkerInfo]:
        self._happen()
        places = [*vacant, *range(len(self._machines), len(self._machines) + len(self._joining))]
        found = dict(zip(places, self._joining, strict=False))
        for place, machine in found.items():
            self._machines[place : place + 1] = [machine]
        self._joining.clear()
        return dict.fromkeys(found, self._info)

    def dismiss(self, worker: int) -> None:
        self._machines[worker] = None
        self._leaving.discard(worker)

    def _check(self, worker: int) -> None:
        self._happen()
        if self._machines[worker] is None:
            raise WorkerLostError(f"stand-in {worker} is lost")

    def _happen(self) -> None:
        for event in self._timeline.due(time.perf_counter() - self._began):
            place = self._machines.index(event.worker) if event.worker in self._machines else None
            if event.kind == "join" and place is None:
                self._joining.append(event.worker)
            elif place is not None:
                self._happens(event, place)

    def _happens(self, event: WorkerEvent, place: int) -> None:
        if event.kind == "lose":
            self.dismiss(place)
            self._lost.append(place)
            self._slowness.pop(event.worker, None)
            if len(self._tokens) > place:
                self._tokens[place] = 0.0
        elif event.kind == "drain":
            self._leaving.add(place)
        elif event.kind == "slow":
            self._slowness[event.worker] = event.factor
