"""The limits of the simulated scheduler, and the workload as flags of ``plan``."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from typing import Any

import numpy as np

from fastdecode.core.errors import ConfigError
from fastdecode.core.machine import SCRATCH_SHARE
from fastdecode.core.state_room import COUNTED_BLOCKS, StateRoom
from fastdecode.perfmodel.lab.cli.machine_inputs import PlanInputs
from fastdecode.perfmodel.lab.cli.workload_inputs import UNBOUNDED_TOKENS
from fastdecode.perfmodel.lab.gpu_only import GpuStepTime
from fastdecode.perfmodel.lab.planner import Planner
from fastdecode.perfmodel.lab.simulate import (
    SimulatedWorkload,
)
from fastdecode.scheduler import Limits


def asked_speeds(text: str | None, num_r_workers: int) -> tuple[float, ...] | None:
    """Return a speed above 0 for each R-worker. Raise ConfigError otherwise."""
    if text is None:
        return None
    try:
        speeds = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"r_worker_speeds must be numbers such as 1,2,1,2, not {text!r}") from None
    if len(speeds) != num_r_workers or not all(0 < speed < math.inf for speed in speeds):
        raise ConfigError(
            f"r_worker_speeds needs a number above 0 for each of {num_r_workers} R-worker(s), not {text!r}"
        )
    return speeds


def state_blocks_of(args: argparse.Namespace, state_tokens: float) -> int:
    """Return the number of blocks of states that take the memory of ``state_tokens`` cached tokens."""
    return math.ceil(state_tokens / args.block_size)


def with_states_here(args: argparse.Namespace, planner: Planner, limits: Limits) -> Limits:
    """Return ``limits`` with the states that the S-worker keeps.

    Raise CapacityError, as an engine does, if the memory for states is too small.
    """
    if planner.states is None or planner.kv_bytes_per_token is None:
        return limits
    size, places = planner.state_bytes_per_sequence, planner.states.num_places
    worth = math.ceil(size / planner.kv_bytes_per_token / args.block_size)
    limits = replace(limits, state_blocks=COUNTED_BLOCKS, state_worth_blocks=worth)
    if math.isinf(places):
        return limits
    return replace(limits, kept_states=StateRoom.of(int(places) * size, size, args.max_num_seqs, args.kv_replicas).kept)


def asked_limits(
    args: argparse.Namespace,
    workload: SimulatedWorkload,
    num_blocks: tuple[int, ...],
    scratch_tokens: int,
    state_blocks: int,
) -> Limits:
    """Return the scheduler's limits from the flags."""
    return Limits(
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        num_mini_batches=args.num_mini_batches,
        scratch_tokens=scratch_tokens,
        max_model_len=args.max_model_len or workload.longest,
        block_size=args.block_size,
        num_blocks=num_blocks,
        bandwidths=(1.0,) * len(num_blocks),
        kv_load_limit=args.kv_load_limit,
        micro_batch_interval=args.micro_batch_interval,
        prefix_caching=args.enable_prefix_caching,
        state_blocks=state_blocks,
    )


def plan_words(args: argparse.Namespace, workload: SimulatedWorkload) -> dict[str, Any]:
    """Return the means of the workload, named like the flags of ``plan``."""
    prompts, outputs = workload.prompt_lens, np.array(workload.output_lens)
    return {
        "seq_len": float(prompts.mean() + outputs.mean()),
        "prompt_len": float(prompts.mean()),
        "output_len_cv": float(outputs.std() / outputs.mean()),
        "shared_prefix_len": 0.0,
        "mini_batch_size": max(1, min(args.max_num_seqs, len(workload)) // args.num_mini_batches),
        "interval_steps": None,
        "gpu_price": None,
        "cpu_price": None,
    }


def scratch_tokens_of(inputs: PlanInputs) -> int:
    """Return how many prompt tokens' K and V fit in SCRATCH_SHARE of the S-worker's memory beside the weights."""
    if inputs.server is None:
        return UNBOUNDED_TOKENS
    shape = inputs.server.shape
    if shape.state:  # with recurrent layers, prompts attend on R-workers
        return 0
    own_dtype = GpuStepTime(
        shape, inputs.server.gpu, shape.kv_layout(shape.dtype).kv_bytes_per_token, inputs.server.group
    )
    return int(own_dtype.capacity_tokens * SCRATCH_SHARE)
