"""Seconds of a step from its rows and cached tokens: all of FastDecode as one formula, and measured steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fastdecode.core.errors import ConfigError
from fastdecode.perfmodel.load import Load, barrier
from fastdecode.perfmodel.stages import NO_CONTENTION, Contention, RPart, SPart, Stages, Transport
from fastdecode.perfmodel.states_here import StatesHere
from fastdecode.perfmodel.storage_costs import NO_STORAGE_COSTS, StorageCosts

NO_TRANSPORT = Transport()


@dataclass(frozen=True)
class StepModel:
    r"""Answers ``StepTime(tokens, kv_tokens)``. Sequences are spread evenly over R-workers and mini-batches.

    ::

        k = 2     S-worker  |A0|B0|A1|B1| … |An|Bn|      one layer of all k mini-batches takes the longest of
                  link         \\A0\\B0\\A1\\ … \\Bn\\         k·S, k·R, k·hop  (a stage is always busy)
                  R-worker      |A0|B0|A1| … |Bn|        S + trip + R     (a mini-batch waits for its own o)
                                         fill ┘  └ drain

    ``num_r_workers``: may be a fraction while a plan is compared. ``contention``: of S-worker and R-workers on one
    machine. ``r_workers_per_core``: R-workers that share cores. ``drains``: R-workers wait while the first mini-batch
    reaches its first attention, and after the last one leaves its last: a layer and the head in all. The paper's
    equations, and so presets, do not include this wait. ``storage``: the cost of ranges and second copies. ``states``:
    states on the S-worker. ``context_spread``: a context's standard deviation divided by its mean, if each layer waits
    for the slowest R-worker; None if loads are already the busiest R-worker's. ``ranges_each``: ranges per sequence, on
    different R-workers.
    """

    num_layers: int
    s_part: SPart
    r_part: RPart
    num_r_workers: float = 1.0
    num_mini_batches: int = 2
    transport: Transport = NO_TRANSPORT
    step_overhead_seconds: float = 0.0
    row_overhead_seconds: float = 0.0
    contention: Contention = NO_CONTENTION
    r_workers_per_core: int = 1
    drains: bool = False
    storage: StorageCosts = NO_STORAGE_COSTS
    states: StatesHere | None = None
    context_spread: float | None = None
    ranges_each: float = 1.0

    def __post_init__(self) -> None:
        counts = (self.num_layers, self.num_mini_batches, self.r_workers_per_core)
        if min(counts) < 1 or not self.num_r_workers > 0:
            raise ConfigError("layers, mini-batches and R-workers must be at least 1")

    def __call__(self, tokens: float, kv_tokens: float) -> float:
        """Return the seconds of a step that decodes ``tokens`` rows over ``kv_tokens`` cached tokens."""
        return self.seconds(Load.decode(tokens, kv_tokens))

    def seconds(self, load: Load) -> float:
        """Return the seconds of a step with ``load``, all mini-batches together."""
        return self._pipeline_seconds(self.stages(load), load.sampled) + self.host_seconds(load.sampled)

    def host_seconds(self, output_tokens: float) -> float:
        """Return the seconds of the engine's own work in a step: once, and per output token."""
        return self.step_overhead_seconds + self.row_overhead_seconds * output_tokens

    def stages(self, load: Load) -> Stages:
        """Return the stages of one layer and mini-batch of a step with ``load``."""
        rows, calls = load.rows / self.num_mini_batches, self.num_mini_batches * self.num_r_workers
        attending = load.sampled + load.reads
        more_bytes = self.storage.link_bytes(load) / self.num_mini_batches
        merging = self.storage.merge_seconds(load, self.num_mini_batches)
        copied_bytes = self.storage.copied_bytes * load.copied_rows / self.num_mini_batches
        storing = self.storage.append_seconds * load.copied_rows / calls
        of_prompts = (load.rows - load.sampled) / calls
        return Stages(
            s_part=self._s_seconds(rows, (load.rows - load.sampled) / self.num_mini_batches) + merging,
            r_part=self.r_workers_per_core
            * (self.r_part.seconds(self._slowest(load) / calls, attending / calls, of_prompts) + storing),
            hop=self.transport.stage_seconds(rows, more_bytes, copied_bytes),
            trip=self.transport.trip_seconds(rows, more_bytes, copied_bytes),
        )

    def _slowest(self, load: Load) -> float:
        """Return ``num_r_workers`` times the expected cached tokens of the fullest R-worker under ``load``."""
        if self.context_spread is None:
            return load.kv_tokens
        each = load.sampled * self.ranges_each / self.num_mini_batches / self.num_r_workers
        return load.kv_tokens * barrier(self.num_r_workers, each, self.context_spread)

    def _s_seconds(self, rows: float, of_prompts: float = 0.0) -> float:
        """Return the S-worker's seconds of one layer and mini-batch of ``rows``.

        ``of_prompts``: prompt rows among them.
        """
        states = self.states.seconds(rows - of_prompts, of_prompts) if self.states else 0.0
        return self.s_part.layer_seconds(rows) + states

    def layer_seconds(self, load: Load) -> float:
        """Return the seconds that one layer of all mini-batches takes under ``load``."""
        return max(self._bounds(self.stages(load)).values())

    def bottleneck(self, load: Load) -> str:
        """Return what limits the step: "s-worker", "r-workers", "transport" or "round-trip"; if equal, the first."""
        bounds = self._bounds(self.stages(load))
        return max(bounds, key=lambda name: bounds[name])

    def balanced_kv_tokens(self, tokens: float) -> float:
        """Return the load, in cached tokens, at which R-part and S-part take equally long; 0 if there is none.

        ``--kv-load-limit auto`` uses this load.
        """
        rows = tokens / self.num_mini_batches
        fixed = self.r_part.call_seconds + self.r_part.row_seconds * rows / self.num_r_workers
        per_worker = self._s_seconds(rows) / self.r_workers_per_core - fixed
        return max(per_worker, 0.0) / self.r_part.seconds_per_token * self.num_r_workers * self.num_mini_batches

    def balanced_kv_tokens_each(self, tokens: float) -> int:
        """Return one R-worker's part of the balanced load: ``Limits.balanced_kv_tokens``."""
        return int(self.balanced_kv_tokens(tokens) / self.num_r_workers)

    def idle_s_share(self, tokens: int) -> float:
        """Return the S-part's seconds for one row, divided by those for ``tokens`` rows: ``Limits.idle_s_share``."""
        layer, head = self._s_seconds, self.s_part.head_seconds
        seconds = [self.num_layers * layer(rows) + head(rows) for rows in (1, tokens / self.num_mini_batches)]
        return min(1.0, seconds[0] / seconds[1])

    def _pipeline_seconds(self, stages: Stages, output_tokens: float) -> float:
        """Return the seconds of all layers and of the output projection, from the ``stages`` of one layer."""
        n, k = self.num_layers, self.num_mini_batches
        head = self.s_part.head_seconds(output_tokens / k)
        least = n * max(self._bounds(stages).values()) + head
        if k == 1 or not self.drains:
            return least + (k - 1) * head
        fill_and_drain = stages.s_part + head
        s_part, r_part = k * (n * stages.s_part + head) - fill_and_drain, n * k * stages.r_part
        return max(least, fill_and_drain + self.contention.together(s_part, r_part))

    def _bounds(self, stages: Stages) -> dict[str, float]:
        k = self.num_mini_batches
        round_trip = stages.s_part + stages.trip + stages.r_part
        if not self.transport.overlapped:
            waits = k * stages.trip
            return {
                "s-worker": k * stages.s_part + waits,
                "r-workers": k * stages.r_part + waits,
                "round-trip": round_trip,
            }
        return {
            "s-worker": k * stages.s_part,
            "r-workers": k * stages.r_part,
            "transport": k * stages.hop,
            "round-trip": round_trip,
        }


class MeasuredStepTime:
    r"""Answers ``StepTime`` from measured steps: it interpolates linearly, and extends the last line beyond."""

    def __init__(self, tokens: Sequence[int], seconds: Sequence[float]) -> None:
        """``tokens``: ascending, at least two. ``seconds``: of steps of as many rows, without cached tokens."""
        self._tokens = np.array(tokens, np.float64)
        self._seconds = np.maximum.accumulate(np.array(seconds, np.float64))

    def __call__(self, tokens: int, kv_tokens: int) -> float:
        """Return the seconds of a step that computes ``tokens`` rows; cached tokens do not count."""
        slope = (self._seconds[-1] - self._seconds[-2]) / (self._tokens[-1] - self._tokens[-2])
        beyond = max(0.0, tokens - self._tokens[-1]) * slope
        return float(np.interp(tokens, self._tokens, self._seconds) + beyond)
