"""Predicts step times of a deployment, from a profile that was measured on this machine."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, fields, replace

from fastdecode import __version__
from fastdecode.core.errors import ProfileError
from fastdecode.core.machine import cpu_name
from fastdecode.perfmodel.measurements import HERE, MachineIdentity
from fastdecode.perfmodel.model_shape import ModelShape
from fastdecode.perfmodel.profile import HardwareProfile
from fastdecode.perfmodel.rank_costs import rank_shape
from fastdecode.perfmodel.sizing import Workload
from fastdecode.perfmodel.stages import SHARED, Contention, RPart, beside_states
from fastdecode.perfmodel.states_here import StatesHere
from fastdecode.perfmodel.step_model import StepModel


@dataclass(frozen=True)
class Deployment:
    """The settings with which a model is run.
    ``r_worker``: "inproc", "spawn" or the "host:port" of remote R-workers. ``separate_cores``: S-worker and R-workers
    share no core. ``r_workers_per_core``: R-workers that share the same cores and take turns. ``num_ranks``: S-worker
    processes that share the model, each with ``s_threads`` threads and ``num_r_workers`` R-workers, all on ``cores``
    cores of this machine. ``longest_context``: matters only to a model with an index (sparse attention). Contexts are
    assumed to have all lengths up to this one equally often. 0: each query reads all tokens.
    """

    s_threads: int
    r_threads: int
    num_r_workers: int = 1
    num_mini_batches: int = 1
    r_worker: str = "inproc"
    separate_cores: bool = False
    r_workers_per_core: int = 1
    num_ranks: int = 1
    cores: int | None = None
    longest_context: int = 0

    @property
    def on_this_machine(self) -> bool:
        """True if S-worker and R-workers share a machine."""
        return self.r_worker in ("inproc", "spawn")

    @property
    def anchor_threads(self) -> tuple[int, int]:
        """The number of S-worker threads, and of R-worker threads, of all ranks together; at most ``cores`` each."""
        s_threads, r_threads = self.num_ranks * self.s_threads, self.num_ranks * self.r_threads
        return min(s_threads, self.cores or s_threads), min(r_threads, self.cores or r_threads)


@dataclass(frozen=True)
class Drift:
    """The factors by which the S-part and the R-part are slower now than when the profile was measured."""

    s_part: float = 1.0
    r_part: float = 1.0


def deployed_step_model(
    profile: HardwareProfile, shape: ModelShape, kv_dtype: str, deployment: Deployment, drift: Drift = Drift()
) -> StepModel:
    """Return a model that predicts the seconds of any step of the model ``shape`` in ``deployment``.

    Raise ProfileError if ``profile`` lacks measurements for this deployment.
    """
    here = deployment.on_this_machine
    num_ranks = deployment.num_ranks
    fixed, per_row = profile.step_overhead_seconds(deployment.r_worker, deployment.num_r_workers, num_ranks)
    own = rank_shape(shape, num_ranks)
    return StepModel(
        num_layers=shape.num_layers,
        s_part=profile.measured_s_part(deployment.s_threads, shape, num_ranks).times(drift.s_part, drift.s_part),
        r_part=_r_part(profile, shape, kv_dtype, deployment).times(drift.r_part),
        num_r_workers=deployment.num_r_workers,
        num_mini_batches=deployment.num_mini_batches,
        transport=profile.transport(deployment.r_worker, own.attending_row_bytes).of_layers(shape.sent_share),
        step_overhead_seconds=fixed * drift.s_part,
        row_overhead_seconds=per_row * drift.s_part,
        contention=_contention(profile, deployment, shape.num_kv_heads) if here else Contention(),
        r_workers_per_core=deployment.r_workers_per_core,
        drains=True,
        states=_states_here(profile, shape, kv_dtype, deployment, drift),
    )


def _states_here(
    profile: HardwareProfile, shape: ModelShape, kv_dtype: str, deployment: Deployment, drift: Drift
) -> StatesHere | None:
    """Return the cost of recurrent states that the S-worker keeps; None if R-workers keep them.
    The profile times states on an R-worker of this machine. The S-worker is assumed to take the same time.
    """
    if shape.own_states is None:
        return None
    seconds = profile.measured_state(kv_dtype, deployment.s_threads, HERE)
    return StatesHere.as_measured(shape, (seconds[0] * drift.r_part, seconds[1] * drift.r_part))


def _r_part(profile: HardwareProfile, shape: ModelShape, kv_dtype: str, deployment: Deployment) -> RPart:
    """Return the times of attention (the R-part) for one rank's R-workers.

    A model with an index (sparse attention) scans the index keys of all tokens, and reads K and V of the best few.
    """
    rows = _rows_r_part(profile, shape, kv_dtype, deployment)
    here = deployment.on_this_machine
    threads = deployment.anchor_threads[1] if here else deployment.r_threads
    r_worker = HERE if here else deployment.r_worker
    if shape.state and not shape.sent_states:
        return beside_states(rows, shape, (0.0, 0.0))
    if shape.state:
        return beside_states(rows, shape, profile.measured_state(kv_dtype, threads, r_worker))
    if shape.index is None:
        return rows
    scan = profile.measured_scan(kv_dtype, threads, r_worker)
    longest = deployment.longest_context
    share = Workload(longest, 0).read_share(shape.windows) if longest else 1.0
    rows = replace(rows, seconds_per_token=share * rows.seconds_per_token)
    scans = scan.times(deployment.num_ranks) if here else scan
    return rows.beside_scan(scans, shape.index.num_layers / shape.num_layers)


def _rows_r_part(profile: HardwareProfile, shape: ModelShape, kv_dtype: str, deployment: Deployment) -> RPart:
    """Return the times of one rank's attention if every query reads its whole context.

    R-workers of several ranks on this machine read at the same time. Together they are as fast as one R-worker with
    all their threads and all KV heads. A KV head or latent that several ranks share is read once per rank.
    """
    num_ranks, own = deployment.num_ranks, rank_shape(shape, deployment.num_ranks)
    if not deployment.on_this_machine:
        return profile.measured_r_part(kv_dtype, deployment.r_threads, shape, deployment.r_worker, num_ranks)
    threads = deployment.anchor_threads[1]
    one = profile.measured_r_part(kv_dtype, threads, shape, HERE, num_ranks if shape.latent else 1)
    copies = num_ranks * own.num_kv_heads / shape.num_kv_heads
    return RPart(copies * one.seconds_per_token, one.call_seconds, copies * one.row_seconds)


def _contention(profile: HardwareProfile, deployment: Deployment, num_kv_heads: int) -> Contention:
    if not deployment.separate_cores:
        return SHARED
    return profile.measured_contention(deployment.s_threads, deployment.r_threads, num_kv_heads)


def this_machine(device_name: str, r_worker: str, isa: str) -> MachineIdentity:
    """Return this machine's name and FastDecode's version for a profile. ``device_name``: the S-worker's GPU or ""."""
    cores = f"{cpu_name()}, {os.cpu_count()} cores"
    return MachineIdentity(socket.gethostname(), device_name or cores, r_worker, isa, __version__)


def check_own(profile: HardwareProfile, here: MachineIdentity) -> None:
    """Raise ProfileError unless ``profile`` was made on the machine and by the version that ``here`` describes."""
    names = {"host": "machine", "s_worker": "S-worker", "isa": "instruction set", "fastdecode_version": "version"}
    for field, words in names.items():
        theirs, ours = getattr(profile.machine, field), getattr(here, field)
        if theirs != ours:
            raise ProfileError(
                f"the profile is of another {words}, {theirs!r}, and this is {ours!r}: run `fastdecode calibrate` here "
                f"(plan and simulate take profiles from anywhere)"
            )


def check_alike(profile: HardwareProfile, shape: ModelShape) -> None:
    """Raise ProfileError unless the layers of ``shape`` have the profile's sizes; KV heads and windows may differ."""
    if shape.multiplies_int8 != profile.shape.multiplies_int8:
        theirs, ours = (
            ("with" if each else "without") for each in (profile.shape.multiplies_int8, shape.multiplies_int8)
        )
        raise ProfileError(
            f"the profile was measured {theirs} --quantization int8, and {shape.name} runs {ours}: give both the same"
        )
    others = ("name", "num_layers", "num_kv_heads", "windows", "chunked", "max_context", "weight_bits")
    sizes = [field.name for field in fields(ModelShape) if field.name not in others]
    unlike = next((size for size in sizes if getattr(shape, size) != getattr(profile.shape, size)), None)
    if unlike:
        raise ProfileError(
            f"the profile was measured on {profile.shape.name}, whose {unlike} is {getattr(profile.shape, unlike)}, "
            f"and {shape.name} has {getattr(shape, unlike)}"
        )
