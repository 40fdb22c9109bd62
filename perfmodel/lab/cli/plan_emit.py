"""The files of ``fastdecode plan --emit``: a plan's hosts, as placeholders, and the commands that start it."""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastdecode.api.settings import parse_kv_cache_memory
from fastdecode.cli.kubernetes_lines import PodPlan, kubernetes_manifests
from fastdecode.cli.launch_lines import S_COMMAND, HostSlots, JobShape, openmpi_line, ray_lines, slurm_script
from fastdecode.core.errors import ConfigError
from fastdecode.perfmodel.known_models import BUILT_IN
from fastdecode.perfmodel.lab.cli.named_machine import host_of
from fastdecode.perfmodel.lab.cli.variants import VARIANTS
from fastdecode.perfmodel.lab.cli.variants.variant import PlanCase
from fastdecode.perfmodel.lab.step_mix import batch_tokens
from fastdecode.perfmodel.sizing import Plan

FORMATS = ("hostfile", "sbatch", "mpirun", "kubernetes", "ray")


def emit(case: PlanCase, found: Mapping[str, Any]) -> str:
    """Return the plan in the requested format. ``found``: see ``PlanAnswer``.

    Prefill workers run on separate hosts, so with them all processes of the job need a key file.
    """
    args = case.args
    num_prefill_workers = found["prefill"].num_prefill_workers if "prefill" in found else 0
    s_flags = shlex.join(word for pair in _s_flags(case, found).items() for word in pair)
    memory = _kv_cache_memory(case)
    _check_simple(args, num_prefill_workers)
    if args.emit == "kubernetes":
        return kubernetes_manifests(_pod_plan(case, found))
    key_file = "pool.key"
    job = JobShape(
        "s-worker",
        tuple(_hosts(case.plan)),
        f"{S_COMMAND} {_model_words(args)}{s_flags}",
        f" --kv-cache-memory {shlex.quote(memory)}" if memory else "",
        named=False,
        p_hosts=tuple(HostSlots(f"prefill-host-{index + 1}", 1) for index in range(num_prefill_workers)),
        p_flags=f" {_model_words(args).rstrip()}" if args.model else "",
        p_gpu=bool(args.prefill_gpu or args.gpu),
        guard=f" --key-file {key_file}" if num_prefill_workers else "",
    )
    if args.emit == "ray":
        cores = _r_cores(args)
        return ray_lines(replace(job, r_flags=f"{f' --r-threads {cores}' if cores else ''}{job.r_flags}"))
    if args.emit == "hostfile":
        return "\n".join(map(str, (HostSlots(job.s_host, 1), *job.r_hosts, *job.p_hosts)))
    return openmpi_line(job, "hostfile") if args.emit == "mpirun" else slurm_script(job)


def _check_simple(args: argparse.Namespace, num_prefill_workers: int) -> None:
    """Raise ConfigError for a plan with several ranks, or with prefill workers, which some formats cannot start."""
    if args.tensor_parallel_size > 1:
        raise ConfigError(f"tensor_parallel_size: --emit {args.emit} supports one rank only")
    if num_prefill_workers and args.emit in ("kubernetes", "ray"):
        raise ConfigError(f"num_prefill_workers: --emit {args.emit} cannot start prefill workers")


def _pod_plan(case: PlanCase, found: Mapping[str, Any]) -> PodPlan:
    """Return the plan for Kubernetes pods. The KV load has no fixed limit, since the number of R-workers may change."""
    args, memory = case.args, _kv_cache_memory(case)
    flags = {name: value for name, value in _s_flags(case, found).items() if name != "--kv-load-limit"}
    return PodPlan(
        num_r_workers=case.plan.num_r_workers,
        s_flags=[f"{name}={value}" for name, value in flags.items()],
        model=Path(_model_path(args.model)).name if args.model else "",
        num_gpus=1 if args.gpu else 0,
        r_cores=_r_cores(args),
        kv_cache_bytes=parse_kv_cache_memory(memory) if memory else None,
    )


def _r_cores(args: argparse.Namespace) -> int | None:
    return host_of(args).cores if args.cpu else None


def _s_flags(case: PlanCase, found: Mapping[str, Any]) -> dict[str, str]:
    """Return the flags, except the model's, that start the S-worker as planned."""
    plan, dtype = case.plan, case.args.kv_cache_dtype
    figures = {
        "--schedule": "sls",
        "--num-mini-batches": plan.num_mini_batches,
        "--max-num-seqs": plan.in_flight,
        "--max-num-batched-tokens": batch_tokens(plan.in_flight, case.planner.workload),
        "--kv-load-limit": plan.kv_load_limit,
    }
    given: dict[str, object] = {} if dtype == "auto" else {"--kv-cache-dtype": dtype}
    if case.args.latent_absorption == "r":
        given["--latent-absorption"] = "r"
    for variant in VARIANTS:
        if variant.name in found:
            given |= variant.s_flags(case, found[variant.name])
    return {name: str(value) for name, value in (given | figures).items()}


def _model_words(args: argparse.Namespace) -> str:
    """Return the model's flag, followed by a space.

    If only the model's name is known here, the flag reads a shell variable.
    """
    if not args.model:
        return ""
    if args.model.lower() in BUILT_IN:
        return f'--model "${{MODEL:?set it to a folder of {args.model}}}" '
    return f"--model {shlex.quote(_model_path(args.model))} "


def _model_path(model: str) -> str:
    """Return the model's path; for a config.json, its folder."""
    path = Path(model)
    return str(path.parent if path.name == "config.json" else path)


def _kv_cache_memory(case: PlanCase) -> str | None:
    """Return the KV memory of an R-worker: as requested, or the one assumed for a preset host; else None."""
    tokens, kv_bytes = case.planner.capacity_tokens, case.planner.kv_bytes_per_token
    found = str(round(tokens * kv_bytes)) if kv_bytes and tokens < math.inf else None
    return case.args.kv_cache_memory or found


def _hosts(plan: Plan) -> Iterator[HostSlots]:
    least, more = divmod(plan.num_r_workers, plan.num_hosts)
    for index in range(plan.num_hosts):
        yield HostSlots(f"r-host-{index + 1}", least + (index < more))
