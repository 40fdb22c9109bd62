"""``fastdecode plan``: how many R-workers for this model, GPU and workload, and whether to use them at all."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from fastdecode.cli.flags import add_common_flags, add_placing_flags
from fastdecode.cli.output import check_output_files, write_json
from fastdecode.perfmodel.lab.cli.machine_flags import add_machine_flags, add_number_flags, add_pipeline_flags
from fastdecode.perfmodel.lab.cli.plan_emit import FORMATS, emit
from fastdecode.perfmodel.lab.cli.shape_inputs import check_state_flags
from fastdecode.perfmodel.lab.cli.variants import VARIANTS, examine
from fastdecode.perfmodel.lab.cli.variants.prefill_workers import add_prefill_flags
from fastdecode.perfmodel.lab.cli.variants.speculative_decoding import add_speculation_flags
from fastdecode.perfmodel.lab.cli.variants.variant import Line, PlanCase, as_json
from fastdecode.perfmodel.lab.gpu_only import GpuOnly, Verdict, judge
from fastdecode.perfmodel.sizing import Plan


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="how many R-workers for this model, GPU and workload",
        description="Sizes a FastDecode installation by the paper's equations, in under a second and without any "
        "hardware, and sets it beside the GPU alone. docs/planning.md has the equations.",
    )
    group = parser.add_argument_group("model and machine, by name")
    add_machine_flags(group)
    group.add_argument(
        "--num-r-workers", type=int, metavar="N", help="of a pool that is there (as many as keep up with the S-worker)"
    )
    group.add_argument("--gpu-price", type=float, metavar="PRICE", help="of one hour of one GPU, in any currency")
    group.add_argument("--cpu-price", type=float, metavar="PRICE", help="of one hour of one host of R-workers")
    add_number_flags(parser.add_argument_group("or as measured"))
    _add_workload_flags(parser.add_argument_group("workload"))
    add_prefill_flags(parser.add_argument_group("prefill workers"), automatic=True)
    add_speculation_flags(parser.add_argument_group("speculative decoding"))
    group = parser.add_argument_group("output")
    group.add_argument("--output-json", metavar="FILE", help="write every figure")
    group.add_argument("--plot", metavar="PNG", help="draw throughput and price against the number of R-workers")
    group.add_argument("--emit", choices=FORMATS, help="print this in place of the plan")
    add_common_flags(parser)
    parser.set_defaults(run=run)


def _add_workload_flags(group: Any) -> None:
    group.add_argument("--seq-len", type=float, metavar="TOKENS", help="prompt + output, the mean (needed)")
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
    add_placing_flags(group, "auto: as the engine chooses")
    group.add_argument("--interval-steps", type=int, metavar="F", help="between micro-batches (a 32nd of the output)")
    add_pipeline_flags(group)


def run(args: argparse.Namespace) -> int:
    """Print the plan, or what ``--emit`` asks for; write its figures, and draw it."""
    check_output_files(args.output_json, plots=(args.plot,))
    check_state_flags(args)
    case, found = examine(PlanCase.of(args))
    limit = math.inf if args.latency_limit is None else args.latency_limit
    alone = case.inputs.server.best(limit) if case.inputs.server else None
    verdict = judge(case.plan, alone, case.planner.prices)
    print(emit(case, found) if args.emit else plan_text(case, found, alone, verdict))
    if args.output_json:
        figures = {name: as_json(each) for name, each in found.items()}
        write_json(plan_figures(case, alone, verdict) | figures, args.output_json)
    if args.plot:
        from fastdecode.perfmodel.lab.measure.plots import plot_plan

        plot_plan(case.planner, case.plan, alone, args.plot)
    return 0


def plan_figures(case: PlanCase, alone: GpuOnly | None, verdict: Verdict) -> dict[str, Any]:
    """Return the object of ``--output-json`` but for its features; figures that nothing determines are null."""
    unknown = dict.fromkeys(("max_batch_size", "output_tokens_per_second", "step_seconds", "limited_by"))
    gpu_only = asdict(alone) if alone else unknown
    rate = alone.output_tokens_per_second if alone else 0.0
    gpu_only["price_per_million_tokens"] = case.planner.prices.per_million_tokens(0, rate)
    return {
        **asdict(case.plan),
        "gpu_only": gpu_only,
        "use_fastdecode": verdict.use_fastdecode,
        "verdict": verdict.sentence,
        "kv_cache_dtype": case.inputs.kv_cache_dtype,
        "latent_absorption": "r" if case.args.latent_absorption == "r" else "s",
        "state_on": "s" if case.planner.states else "r",
        "workload": asdict(case.planner.workload),
        "assumptions": list(case.inputs.assumptions),
    }


def plan_text(case: PlanCase, found: Mapping[str, Any], alone: GpuOnly | None, verdict: Verdict) -> str:
    """Return the plan as it is printed; ``found``: figures of its features, by the names of their variants."""
    features = [(variant, found[variant.name]) for variant in VARIANTS if variant.name in found]
    lines = [*_figures(case.plan), *(line for each, figures in features for line in each.lines(case, figures))]
    tables = ["\n".join(each.table(case, figures)) for each, figures in features]
    blocks = [
        _title(case),
        "\n".join(f"  {name:18s}{text}" for name, text in lines),
        _alone(case, alone),
        verdict.sentence,
        "\n".join(_candidates(case.plan)),
        *tables,
        "\n".join(("Rests on:", *(f"  {line}" for line in case.inputs.assumptions))),
    ]
    return "\n\n".join(block for block in blocks if block)


def _title(case: PlanCase) -> str:
    workload, inputs = case.planner.workload, case.inputs
    lengths = f"{workload.prompt_len:g} prompt + {workload.output_len:g} output tokens"
    dtype = f", {inputs.kv_cache_dtype} cache" if inputs.kv_cache_dtype != "auto" else ""
    return f"{inputs.title}: {lengths}{dtype}"


def _binding(plan: Plan) -> str:
    """Say what binds R-workers, and by how much."""
    if plan.r_workers_arithmetic_over_reads is None:
        return ""
    more = plan.r_workers_arithmetic_over_reads
    if more > 1:
        return f" (arithmetic binds: {more:.2g} times the seconds of reading)"
    return f" (reads bind: arithmetic takes {more:.2g} times their seconds)"


def _figures(plan: Plan) -> Iterator[Line]:
    taking_turns = f"{plan.num_mini_batches} of them: {plan.in_flight} in flight"
    yield "mini-batch size", f"{plan.mini_batch_size}, {taking_turns}"
    reading = plan.r_worker_bandwidth_gb_per_s
    each = f", each reading {reading:.1f} GB/s of KV" if reading else ""
    each += _binding(plan)
    why = {"memory": " (more for their memory)", "pool": " (as given)"}.get(plan.r_workers_set_by, "")
    ranks = plan.tensor_parallel_size
    of_each = f" of each of {ranks} ranks, {plan.total_r_workers} in all" if ranks > 1 else ""
    yield "R-workers", f"{plan.num_r_workers}{of_each}{why}, {plan.num_r_workers_exact:.2f} exactly{each}"
    yield "hosts", f"{plan.num_hosts}"
    yield "schedule", f"{plan.micro_batch_size} sequences (M) start every {plan.interval_steps} steps (F)"
    yield "KV load limit", f"{plan.kv_load_limit} tokens (W_lim)"
    yield "step", f"{plan.step_seconds * 1e3:.1f} ms, S busy {plan.s_busy:.0%}, R busy {plan.r_busy:.0%}"
    yield "throughput", f"{plan.output_tokens_per_second:.0f} output tokens/s"
    yield "sequence", f"{plan.sequence_seconds:.1f} s"
    hint = " (--num-mini-batches 3 would hide more of it)" if plan.bottleneck == "round-trip" else ""
    yield "bottleneck", plan.bottleneck + hint
    if plan.price_per_million_tokens is not None:
        yield "price", f"{plan.price_per_million_tokens:.3g} per million output tokens"


def _alone(case: PlanCase, alone: GpuOnly | None) -> str:
    if alone is None:
        return ""
    price = case.planner.prices.per_million_tokens(0, alone.output_tokens_per_second)
    paid = f", {price:.3g} per million" if price is not None else ""
    batch = f"batch {alone.max_batch_size} (limited by {alone.limited_by})"
    return f"  {'GPU alone':18s}{batch}, {alone.output_tokens_per_second:.0f} output tokens/s{paid}"


def _candidates(plan: Plan) -> Iterator[str]:
    price = "price/1M" if plan.price_per_million_tokens is not None else ""
    yield f"  R-workers  hosts   step ms  tokens/s  S busy  R busy  bottleneck  {price:>9s}".rstrip()
    for row in plan.candidates:
        mark = "*" if row.num_r_workers == plan.num_r_workers else " "
        busy = f"{row.s_busy:7.0%} {row.r_busy:7.0%}"
        limit = row.bottleneck if row.fits_memory else "no memory"
        price = "" if row.price_per_million_tokens is None else f"{row.price_per_million_tokens:.3g}"
        yield (
            f"{mark} {row.num_r_workers:9d} {row.num_hosts:6d} {row.step_seconds * 1e3:9.1f} "
            f"{row.output_tokens_per_second:9.0f} {busy}  {limit:11s} {price:>9s}"
        ).rstrip()
