"""A profile in a live run: the model of this engine's own steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fastdecode.config import EngineConfig
from fastdecode.machine import usable_cores
from fastdecode.perfmodel.deployment import Deployment, check_alike, check_own, deployed_step_model, this_machine
from fastdecode.perfmodel.profile_json import load_profile
from fastdecode.perfmodel.step_model import StepModel
from fastdecode.resources import s_thread_count
from fastdecode.sworker import SModel
from fastdecode.types import RWorkerInfo


def live_step_model(
    config: EngineConfig, model: SModel, r_workers: Sequence[RWorkerInfo], num_mini_batches: int
) -> StepModel:
    """The steps of this engine by ``config.profile``; ProfileError where that is another machine's or model's."""
    profile = load_profile(str(config.profile))
    check_own(profile, this_machine(model.device_name, profile.machine.r_worker, r_workers[0].isa))
    shape, spec = model.shape, config.r_worker_spec
    check_alike(profile, shape)
    names = spec.addresses or (spec.kind,)
    deployment = Deployment(
        s_threads=1 if model.on_gpu else s_thread_count(config),
        r_threads=r_workers[0].num_threads,
        num_r_workers=len(r_workers),
        num_mini_batches=num_mini_batches,
        r_worker=names[0],
        separate_cores=config.separate_cores or model.on_gpu,
        r_workers_per_core=_r_workers_per_core(config, r_workers),
    )
    each = (
        deployed_step_model(profile, shape, model.layout.kv_dtype, replace(deployment, r_worker=name)) for name in names
    )
    tokens = config.max_num_seqs
    return max(each, key=lambda steps: steps(tokens, tokens * model.max_model_len))  # everybody waits for the slowest


def _r_workers_per_core(config: EngineConfig, r_workers: Sequence[RWorkerInfo]) -> int:
    """How many R-workers of this machine take turns on a core."""
    if not config.r_worker_spec.on_this_machine:
        return 1
    cores = config.r_core_list or usable_cores()
    return -(-sum(worker.num_threads for worker in r_workers) // len(cores))
