"""The cost of a step on the simulated machine, and the busy time of each side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from fastdecode.core.errors import PlanError
from fastdecode.perfmodel.lab.gpu_only import GpuStepTime
from fastdecode.perfmodel.load import Load
from fastdecode.perfmodel.step_model import StepModel


@dataclass(frozen=True)
class StepCost:
    """The seconds of one step, and what they consist of.
    ``wall_seconds``: the whole step. ``host_seconds``: the host's work between steps. ``transfer_seconds``: round trips
    to an R-worker. ``r_seconds``: each R-worker's attention, float64 [num_workers].
    """

    wall_seconds: float
    s_seconds: float
    host_seconds: float
    transfer_seconds: float
    r_seconds: np.ndarray


class Machine(Protocol):
    """The interface of a simulated machine, which knows what each step costs.

    ``kv_bytes_per_token``: read, over all layers; 0 if unknown. ``seconds_per_moved_token``: to copy a cached token
    between R-workers.
    """

    @property
    def kv_bytes_per_token(self) -> float: ...

    @property
    def seconds_per_moved_token(self) -> float: ...

    def cost(self, load: Load, kv_loads: Sequence[float]) -> StepCost:
        """Return the cost of a step with ``load``; each R-worker attends its part of ``kv_loads``."""

    def changed(self, places: Sequence[int], factors: Mapping[int, float]) -> Machine:
        """Return this machine after R-workers have come or gone: the scheduler's R-worker i is machine ``places[i]``.
        A place below 0 is vacant. ``factors``: how many times slower than initially a machine is, by its number.
        """


@dataclass(frozen=True)
class SplitMachine:
    """FastDecode: an S-worker and R-workers. A step waits for the busiest R-worker.
    ``speeds``: relative speed of each R-worker, in any unit; ``model`` describes the mean speed. None: all are equal.
    ``slowness``: a further factor by which each R-worker is slower.
    """

    model: StepModel
    kv_bytes_per_token: float = 0
    speeds: tuple[float, ...] | None = None
    seconds_per_moved_token: float = 0.0
    slowness: tuple[float, ...] | None = None

    def cost(self, load: Load, kv_loads: Sequence[float]) -> StepCost:
        """Return the cost by the model, as if every R-worker had mean speed and the busiest one's load."""
        model = replace(self.model, context_spread=None)  # the loads are known: no estimate is needed
        loads = np.asarray(kv_loads, np.float64)
        if self.speeds is not None:
            loads = loads * np.mean(self.speeds) / self.speeds
        if self.slowness is not None:
            loads = loads * self.slowness
        as_busiest = model.num_r_workers * float(loads.max())
        load = replace(load, kv_tokens=as_busiest)
        stages, k = model.stages(load), model.num_mini_batches
        calls = model.num_layers * k
        calls_each = k * model.num_r_workers
        of_prompts = (load.rows - load.sampled) / calls_each
        fixed = model.r_part.seconds(0, (load.sampled + load.reads) / calls_each, of_prompts)
        storing = model.storage.append_seconds * load.copied_rows / k / model.num_r_workers
        attending = fixed * (loads > 0) + storing + model.r_part.seconds_per_token * loads / k
        return StepCost(
            wall_seconds=model.seconds(load),
            s_seconds=calls * stages.s_part + k * model.s_part.head_seconds(load.sampled / k),
            host_seconds=model.host_seconds(load.sampled),
            transfer_seconds=calls * stages.trip,
            r_seconds=calls * attending,
        )

    def changed(self, places: Sequence[int], factors: Mapping[int, float]) -> SplitMachine:
        """See ``Machine``. A machine whose number is beyond ``speeds`` has the mean speed."""
        mean, speeds = float(np.mean(self.speeds or 1.0)), dict(enumerate(self.speeds or ()))
        slowness = tuple(mean / speeds.get(each, mean) * factors.get(each, 1.0) for each in places)
        model = replace(self.model, num_r_workers=sum(each >= 0 for each in places))
        return replace(self, model=model, speeds=None, slowness=slowness)


@dataclass(frozen=True)
class GpuMachine:
    """A GPU alone: its memory holds the cache, and its attention adds to the step. One "R-worker" is that attention."""

    step_time: GpuStepTime
    seconds_per_moved_token: float = 0.0

    @property
    def kv_bytes_per_token(self) -> float:
        """The bytes of a cached token that are read, over all layers."""
        return self.step_time.read_share * self.step_time.kv_bytes_per_token

    def cost(self, load: Load, kv_loads: Sequence[float]) -> StepCost:
        """Return the cost by the roofline. S time is a step without cached tokens; ranges and copies do not apply."""
        kv_tokens = sum(kv_loads)
        wall, s_part = (self.step_time(load.rows, tokens, load.sampled) for tokens in (kv_tokens, 0))
        return StepCost(wall, s_part, 0.0, 0.0, np.array([wall - s_part]))

    def changed(self, places: Sequence[int], factors: Mapping[int, float]) -> GpuMachine:
        """Raise PlanError, since nothing joins or leaves."""
        raise PlanError("a GPU alone has no R-workers that come and go")
