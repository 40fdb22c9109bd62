"""``fastdecode plan``: how many R-workers for this model, GPU and workload, and whether to use them at all."""

from __future__ import annotations

import argparse
import json
import math
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastdecode.cli.flags import add_common_flags
from fastdecode.cli.machine_flags import add_machine_flags, add_number_flags, add_pipeline_flags
from fastdecode.cli.output_files import check_output_files
from fastdecode.cli.plan_emit import FORMATS, emit
from fastdecode.cli.plan_inputs import PlanInputs, read_inputs
from fastdecode.cli.plan_text import plan_text
from fastdecode.cli.plan_validate import run_validation
from fastdecode.perfmodel.gpu_only import GpuOnly
from fastdecode.perfmodel.plan import Plan
from fastdecode.perfmodel.verdict import Verdict, judge


def add_command(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "plan",
        help="how many R-workers for this model, GPU and workload",
        description="Sizes a FastDecode installation by the paper's equations, in under a second and without any "
        "hardware, and sets it beside the GPU alone. docs/planning.md has the equations.",
    )
    group = parser.add_argument_group("model and machine, by name")
    add_machine_flags(group)
    group.add_argument("--gpu-price", type=float, metavar="PRICE", help="of one hour of all GPUs, in any currency")
    group.add_argument("--cpu-price", type=float, metavar="PRICE", help="of one hour of one host of R-workers")
    add_number_flags(parser.add_argument_group("or as measured"))
    _add_workload_flags(parser.add_argument_group("workload"))
    group = parser.add_argument_group("output")
    group.add_argument("--output-json", metavar="FILE", help="write every figure")
    group.add_argument("--plot", metavar="PNG", help="draw throughput and price against the number of R-workers")
    group.add_argument(
        "--validate", nargs="?", type=int, const=0, metavar="N",
        help="run real configurations here (N of them; all) and print predicted against measured; needs --profile and "
        "the --model folder it was made with",
    )  # fmt: skip
    group.add_argument("--emit", choices=FORMATS, help="print this in place of the plan")
    add_common_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the plan."""
    check_output_files(args.output_json, args.plot)
    if args.validate is not None:
        return run_validation(args)
    inputs = read_inputs(args)
    planner = inputs.planner
    plan = planner.plan(_mini_batch_size(args, inputs))
    limit = math.inf if args.latency_limit is None else args.latency_limit
    alone = inputs.server.best(limit) if inputs.server else None
    verdict = judge(plan, alone, planner.prices)
    if args.emit:
        rows_per_output_token = planner.workload.rows_per_output_token
        print(emit(args.emit, plan, _engine_flags(args), rows_per_output_token, _r_worker_flags(args, inputs)))
    else:
        print(plan_text(inputs, plan, alone, verdict))
    if args.output_json:
        figures = plan_figures(inputs, plan, alone, verdict)
        Path(args.output_json).write_text(json.dumps(figures, indent=2) + "\n")
    if args.plot:
        from fastdecode.cli.plan_plot import plot_plan

        plot_plan(planner, plan, alone, args.plot)
    return 0


def plan_figures(inputs: PlanInputs, plan: Plan, alone: GpuOnly | None, verdict: Verdict) -> dict[str, Any]:
    """The object of ``--output-json``; figures nobody can know from the inputs are null."""
    unknown = dict.fromkeys(("max_batch_size", "output_tokens_per_second", "step_seconds", "limited_by"))
    gpu_only = asdict(alone) if alone else unknown
    rate = alone.output_tokens_per_second if alone else 0.0
    gpu_only["price_per_million_tokens"] = inputs.planner.prices.per_million_tokens(0, rate)
    return {
        **asdict(plan),
        "gpu_only": gpu_only,
        "use_fastdecode": verdict.use_fastdecode,
        "verdict": verdict.sentence,
        "kv_cache_dtype": inputs.kv_cache_dtype,
        "workload": asdict(inputs.planner.workload),
        "assumptions": list(inputs.assumptions),
    }


def _mini_batch_size(args: argparse.Namespace, inputs: PlanInputs) -> int:
    """As asked; else the largest within the latency limit; else at the knee of E(B)."""
    if args.mini_batch_size is not None:
        return args.mini_batch_size
    if args.latency_limit is not None:
        return inputs.planner.largest_mini_batch(args.latency_limit)
    return inputs.planner.knee_mini_batch()


def _engine_flags(args: argparse.Namespace) -> str:
    given = {"--model": args.model, "--kv-cache-dtype": None if args.kv_cache_dtype == "auto" else args.kv_cache_dtype}
    return "".join(f"{flag} {shlex.quote(value)} " for flag, value in given.items() if value is not None)


def _r_worker_flags(args: argparse.Namespace, inputs: PlanInputs) -> str:
    """The memory asked for, or else what the plan took a preset to have; nothing where it counted on none."""
    tokens, kv_bytes = inputs.planner.capacity_tokens, inputs.planner.kv_bytes_per_token
    memory = str(round(tokens * kv_bytes)) if kv_bytes and tokens < math.inf else None
    memory = args.kv_cache_memory or memory
    return f" --kv-cache-memory {shlex.quote(memory)}" if memory else ""


def _add_workload_flags(group: Any) -> None:
    group.add_argument(
        "--seq-len", type=float, metavar="TOKENS", help="prompt + output, the mean (needed, but not with --validate)"
    )
    group.add_argument("--prompt-len", type=float, default=0.0, metavar="TOKENS", help="of those, the prompt's (0)")
    group.add_argument("--shared-prefix-len", type=float, default=0.0, metavar="TOKENS", help="all prompts' start (0)")
    group.add_argument(
        "--output-len-cv", type=float, default=0.0, metavar="CV", help="deviation of output lengths over their mean (0)"
    )
    size = group.add_mutually_exclusive_group()
    size.add_argument("--mini-batch-size", type=int, metavar="B", help="sequences (the knee of B / T(B))")
    size.add_argument(
        "--latency-limit", type=float, metavar="SECONDS", help="of a whole sequence: the largest B for it"
    )
    group.add_argument("--interval-steps", type=int, metavar="F", help="between micro-batches (a 32nd of the output)")
    add_pipeline_flags(group)
