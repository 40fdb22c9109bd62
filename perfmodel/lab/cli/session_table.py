"""``fastdecode plan --table``: sessions by context, for the GPU alone, FastDecode, and a streamed cache."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from fastdecode.core.errors import PlanError
from fastdecode.perfmodel.lab.cli.machine_inputs import read_inputs
from fastdecode.perfmodel.lab.cli.planner_inputs import PlanInputs
from fastdecode.perfmodel.lab.cli.shape_inputs import named_shape
from fastdecode.perfmodel.lab.cli.variants.variant import with_enough_gpus
from fastdecode.perfmodel.lab.gpu_only import GpuServer

SESSIONS = (1, 4, 8, 32)


@dataclass(frozen=True)
class Cell:
    """Milliseconds per token of each of ``sessions`` sessions over ``context`` cached tokens.

    Return None if memory or the model does not allow it.
    """

    context: int
    sessions: int
    gpu_alone: float | None
    fastdecode: float | None
    streamed: float | None


def session_cells(args: argparse.Namespace) -> Iterator[Cell]:
    """Yield the cells of the table, by context and sessions."""
    args = with_enough_gpus(args)
    longest = named_shape(args.model).max_context if args.model else 0
    contexts = (8192, 32768, 131072, 262144)
    for context in contexts:
        inputs = _inputs(args, context) if not longest or context <= longest else None
        for sessions in SESSIONS:
            if inputs is None or inputs.server is None:
                yield Cell(context, sessions, None, None, None)
            else:
                alone, streamed = _alone(inputs.server, sessions), _streamed(inputs, inputs.server, sessions)
                yield Cell(context, sessions, alone, _fastdecode(inputs, sessions), streamed)


def table_lines(cells: Iterator[Cell]) -> Iterator[str]:
    """Yield the printed lines of the table."""
    yield "ms per token for each session (tokens/s of all sessions), cached tokens per session as said"
    yield f"  {'context':>9s} {'sessions':>8s} {'GPU alone':>18s} {'FastDecode':>18s} {'KV over PCIe':>18s}  best"
    for cell in cells:
        ways = {"GPU alone": cell.gpu_alone, "FastDecode": cell.fastdecode, "KV over PCIe": cell.streamed}
        known = {name: value for name, value in ways.items() if value is not None}
        best = min(known, key=known.__getitem__) if known else "-"
        texts = " ".join(f"{_text(value, cell.sessions):>18s}" for value in ways.values())
        yield f"  {cell.context:9,} {cell.sessions:8d} {texts}  {best}"
    yield "-: memory is too small, or the context is beyond the model's. KV over PCIe: the cache lies in the host's"
    yield "memory and crosses the link in each step, as with llama-server --no-kv-offload and its kind."


def _text(milliseconds: float | None, sessions: int) -> str:
    if milliseconds is None:
        return "-"
    return f"{milliseconds:,.4g} ({sessions * 1e3 / milliseconds:,.3g}/s)"


def _inputs(args: argparse.Namespace, context: int) -> PlanInputs | None:
    """Return inputs for sessions with ``context`` cached tokens; None if an R-worker holds none."""
    words: dict[str, Any] = {
        "seq_len": context + 1.0,
        "prompt_len": float(context),
        "shared_prefix_len": 0.0,
        "output_len_cv": 0.0,
    }
    words |= {"mini_batch_size": None, "interval_steps": None, "num_mini_batches": 1}
    words |= {"latent_absorption": "s" if args.latent_absorption == "auto" else args.latent_absorption}
    words |= {"state_on": "r" if args.state_on == "auto" else args.state_on}
    longest = named_shape(args.model).max_context if args.model else 0
    if longest and context + 1 > longest:
        words |= {"seq_len": float(longest), "prompt_len": longest - 1.0}
    try:
        inputs = read_inputs(argparse.Namespace(**vars(args) | words))
    except PlanError:
        return None
    decodes = replace(inputs.planner.workload, remote_prompts=True)
    server = replace(inputs.server, workload=decodes) if inputs.server else None
    return replace(inputs, planner=replace(inputs.planner, workload=decodes), server=server)


def _alone(server: GpuServer, sessions: int) -> float | None:
    return server.step_seconds(sessions) * 1e3 if sessions <= server.most_sequences else None


def _fastdecode(inputs: PlanInputs, sessions: int) -> float | None:
    """Return the shorter step of one or two mini-batches, with the given R-workers or as many as keep up."""
    found = []
    for count in (1, 2) if sessions > 1 else (1,):
        planner = replace(inputs.planner, num_mini_batches=count)
        size = math.ceil(sessions / count)
        workers = planner.num_r_workers or max(
            math.ceil(planner.enough_r_workers(size)), planner.memory_r_workers(sessions)
        )
        if planner.memory_r_workers(sessions) <= workers:
            found.append(planner.candidate(size, workers).step_seconds * 1e3)
    return min(found, default=None)


def _streamed(inputs: PlanInputs, server: GpuServer, sessions: int) -> float | None:
    """Return the step of a GPU that receives the whole cache over its link while it reads weights."""
    held = sessions * server.own_kv_bytes
    capacity = inputs.planner.capacity_tokens * (inputs.planner.kv_bytes_per_token or 0)
    if held > capacity * inputs.planner.r_workers_per_host:
        return None
    over_link = server.read_share * held / server.gpu.host_bytes_per_second
    return max(over_link, server.step_seconds(sessions)) * 1e3
