"""What ``fastdecode plan --emit`` prints: the hosts of a plan and the lines that start it, on placeholders."""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Iterator
from pathlib import Path

from fastdecode.cli.launch_lines import S_COMMAND, HostSlots, JobShape, openmpi_line, slurm_script
from fastdecode.cli.machine_inputs import PlanInputs
from fastdecode.perfmodel.equations import TILE_TOKENS
from fastdecode.perfmodel.model_shape import BUILT_IN
from fastdecode.perfmodel.plan import Plan
from fastdecode.perfmodel.prefill_plan import PrefillPlan

KEY_FILE = "pool.key"
FORMATS = ("hostfile", "sbatch", "mpirun")


def emit(args: argparse.Namespace, inputs: PlanInputs, plan: Plan, prefill: PrefillPlan | None) -> str:
    """In the format ``args.emit``. Each prefill worker has a host of its own, so that all ranks need a key."""
    num_prefill_workers = prefill.num_prefill_workers if prefill else 0
    job = JobShape(
        "s-worker",
        tuple(_hosts(plan)),
        f"{S_COMMAND} {_engine_flags(args)}{_flags(plan, inputs.planner.workload.rows_per_output_token)}",
        _r_worker_flags(args, inputs),
        named=False,
        p_hosts=tuple(HostSlots(f"prefill-host-{index + 1}", 1) for index in range(num_prefill_workers)),
        p_flags=f" {_model_flag(args)}" if args.model else "",
        p_gpu=bool(args.prefill_gpu or args.gpu),
        guard=f" --key-file {KEY_FILE}" if num_prefill_workers else "",
    )
    if args.emit == "hostfile":
        return "\n".join(map(str, (HostSlots(job.s_host, 1), *job.r_hosts, *job.p_hosts)))
    return openmpi_line(job, "hostfile") if args.emit == "mpirun" else slurm_script(job)


def _engine_flags(args: argparse.Namespace) -> str:
    """What the plan's own inputs fix."""
    text = f"{_model_flag(args)} " if args.model else ""
    return text if args.kv_cache_dtype == "auto" else f"{text}--kv-cache-dtype {args.kv_cache_dtype} "


def _model_flag(args: argparse.Namespace) -> str:
    """A model known here by name alone is asked of the shell that runs the line."""
    if args.model.lower() in BUILT_IN:
        return f'--model "${{MODEL:?set it to a folder of {args.model}}}"'
    path = Path(args.model)
    return f"--model {shlex.quote(str(path.parent if path.name == 'config.json' else path))}"


def _r_worker_flags(args: argparse.Namespace, inputs: PlanInputs) -> str:
    """The memory asked for, or else what the plan took a preset to have; nothing where it counted on none."""
    tokens, kv_bytes = inputs.planner.capacity_tokens, inputs.planner.kv_bytes_per_token
    memory = str(round(tokens * kv_bytes)) if kv_bytes and tokens < math.inf else None
    memory = args.kv_cache_memory or memory
    return f" --kv-cache-memory {shlex.quote(memory)}" if memory else ""


def _hosts(plan: Plan) -> Iterator[HostSlots]:
    """R-workers are spread as evenly as they go."""
    least, more = divmod(plan.num_r_workers, plan.num_hosts)
    for index in range(plan.num_hosts):
        yield HostSlots(f"r-host-{index + 1}", least + (index < more))


def _flags(plan: Plan, rows_per_output_token: float) -> str:
    tokens = math.ceil(plan.in_flight * rows_per_output_token / TILE_TOKENS) * TILE_TOKENS
    return (
        f"--schedule sls --num-mini-batches {plan.num_mini_batches} --max-num-seqs {plan.in_flight} "
        f"--max-num-batched-tokens {tokens} --kv-load-limit {plan.kv_load_limit}"
    )
