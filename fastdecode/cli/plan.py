"""``fastdecode plan``: how many R-workers for this model, GPU and workload, and whether to use them at all."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from fastdecode.api.config import EngineConfig
from fastdecode.cli.flags import add_common_flags, add_flags
from fastdecode.cli.machine_inputs import (
    PlanInputs,
    add_machine_flags,
    add_number_flags,
    add_pipeline_flags,
    read_inputs,
)
from fastdecode.cli.output import check_output_files, write_json
from fastdecode.cli.plan_lines import FORMATS, emit
from fastdecode.cli.plan_ranges import RangePlan, plan_ranges, range_text, with_ranges
from fastdecode.cli.plan_ranks import compare_ranks, rank_lines
from fastdecode.cli.plan_replicas import ReplicaPlan, plan_replicas, replica_lines
from fastdecode.cli.prefill_inputs import AUTOMATIC, add_prefill_flags, prefill_forecast
from fastdecode.cli.speculation_inputs import add_speculation_flags, read_drafting
from fastdecode.core.errors import ConfigError
from fastdecode.perfmodel.gpu_only import GpuOnly, Verdict, judge
from fastdecode.perfmodel.plan import Candidate, Plan
from fastdecode.perfmodel.prefill_plan import PrefillPlan, plan_prefill
from fastdecode.perfmodel.speculation import SpeculationPlan, plan_speculation


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


def run(args: argparse.Namespace) -> int:
    """Print the plan."""
    check_output_files(args.output_json, plots=(args.plot,))
    inputs = read_inputs(args)
    plan = inputs.planner.plan(_mini_batch_size(args, inputs))
    if args.kv_shard_tokens and args.kv_replicas > 1:
        raise ConfigError("kv_shard_tokens: plan knows no ranges of sequences with kv_replicas: leave one of them out")
    ranges = plan_ranges(args, inputs.planner, plan)
    planner = with_ranges(inputs.planner, ranges)
    inputs, plan = replace(inputs, planner=planner), planner.plan(plan.mini_batch_size)
    limit = math.inf if args.latency_limit is None else args.latency_limit
    alone = inputs.server.best(limit) if inputs.server else None
    verdict = judge(plan, alone, planner.prices)
    replicas = None if ranges.kv_shard_tokens else plan_replicas(planner, plan)
    prefill, drafting = _prefill_plan(args, inputs, plan), read_drafting(args, inputs)
    speculation = plan_speculation(planner, plan, drafting) if drafting else None
    if args.emit:
        print(emit(args, inputs, plan, prefill))
    else:
        ranks = "\n".join(rank_lines(compare_ranks(args, _mini_batch_size), plan.tensor_parallel_size))
        print(plan_text(inputs, plan, alone, verdict, prefill, speculation, ranks, ranges, replicas))
    if args.output_json:
        figures = plan_figures(inputs, plan, alone, verdict)
        figures["tensor_parallel"] = [asdict(row) for row in compare_ranks(args, _mini_batch_size)]
        more = {"prefill": prefill, "speculation": speculation, "ranges": ranges, "replicas": replicas}
        write_json(figures | {name: asdict(each) for name, each in more.items() if each}, args.output_json)
    if args.plot:
        from fastdecode.measure.plots import plot_plan

        plot_plan(planner, plan, alone, args.plot)
    return 0


def plan_figures(inputs: PlanInputs, plan: Plan, alone: GpuOnly | None, verdict: Verdict) -> dict[str, Any]:
    """The object of ``--output-json``; figures that the inputs do not determine are null."""
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


def _prefill_plan(args: argparse.Namespace, inputs: PlanInputs, plan: Plan) -> PrefillPlan | None:
    """None where no prefill workers were asked for."""
    forecast = prefill_forecast(args)
    if forecast is None:
        return None
    planner = inputs.planner
    if planner.workload.prompt_len <= planner.workload.shared_prefix_len:
        raise ConfigError("num_prefill_workers: there are no prompts to compute; give --prompt-len")
    local = replace(planner, workload=replace(planner.workload, remote_prompts=False))
    return plan_prefill(
        forecast.model, planner.workload, plan.output_tokens_per_second, plan.step_seconds,
        local.candidate(plan.mini_batch_size, plan.num_r_workers).step_seconds,
        None if args.num_prefill_workers == AUTOMATIC else args.num_prefill_workers,
    )  # fmt: skip


def _mini_batch_size(args: argparse.Namespace, inputs: PlanInputs) -> int:
    """As asked; else the largest within the latency limit; else at the knee of E(B)."""
    if args.mini_batch_size is not None:
        return args.mini_batch_size
    if args.latency_limit is not None:
        return inputs.planner.largest_mini_batch(args.latency_limit)
    return inputs.planner.knee_mini_batch()


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
    add_flags(
        group, EngineConfig, ("kv_shard_tokens", "kv_replicas"),
        kv_shard_tokens={"unset": "auto: as the engine chooses"},
    )  # fmt: skip
    group.add_argument("--interval-steps", type=int, metavar="F", help="between micro-batches (a 32nd of the output)")
    add_pipeline_flags(group)


def plan_text(
    inputs: PlanInputs,
    plan: Plan,
    alone: GpuOnly | None,
    verdict: Verdict,
    prefill: PrefillPlan | None = None,
    speculation: SpeculationPlan | None = None,
    ranks: str = "",
    ranges: RangePlan | None = None,
    replicas: ReplicaPlan | None = None,
) -> str:
    """The figures, the GPU alone, the verdict, the candidates, ``ranks`` and what all of it rests on."""
    more_lines = [_line(*line) for line in replica_lines(replicas)] if replicas else []
    if ranges and ranges.kv_shard_tokens:
        more_lines = [_line("ranges", range_text(inputs.planner, ranges))]
    blocks = [
        _title(inputs),
        "\n".join((*_figures(plan), *more_lines, *_prefill_lines(prefill), *_speculation_lines(speculation, plan))),
        _alone(inputs, alone),
        verdict.sentence,
    ]
    blocks += [
        "\n".join(_candidates(plan)),
        ranks,
        "\n".join(("Rests on:", *(f"  {line}" for line in inputs.assumptions))),
    ]
    return "\n\n".join(block for block in blocks if block)


def _title(inputs: PlanInputs) -> str:
    workload = inputs.planner.workload
    lengths = f"{workload.prompt_len:g} prompt + {workload.output_len:g} output tokens"
    dtype = f", {inputs.kv_cache_dtype} cache" if inputs.kv_cache_dtype != "auto" else ""
    return f"{inputs.title}: {lengths}{dtype}"


def _figures(plan: Plan) -> Iterator[str]:
    yield _line(
        "mini-batch size", f"{plan.mini_batch_size}, {plan.num_mini_batches} of them: {plan.in_flight} in flight"
    )
    reading = plan.r_worker_bandwidth_gb_per_s
    each = f", each reading {reading:.1f} GB/s of KV" if reading else ""
    why = " (more for their memory)" if plan.r_workers_set_by == "memory" else ""
    ranks = plan.tensor_parallel_size
    of_each = f" of each of {ranks} ranks, {plan.total_r_workers} in all" if ranks > 1 else ""
    yield _line("R-workers", f"{plan.num_r_workers}{of_each}{why}, {plan.num_r_workers_exact:.2f} exactly{each}")
    yield _line("hosts", f"{plan.num_hosts}")
    yield _line("schedule", f"{plan.micro_batch_size} sequences (M) start every {plan.interval_steps} steps (F)")
    yield _line("KV load limit", f"{plan.kv_load_limit} tokens (W_lim)")
    yield _line("step", f"{plan.step_seconds * 1e3:.1f} ms, S busy {plan.s_busy:.0%}, R busy {plan.r_busy:.0%}")
    yield _line("throughput", f"{plan.output_tokens_per_second:.0f} output tokens/s")
    yield _line("sequence", f"{plan.sequence_seconds:.1f} s")
    hint = " (--num-mini-batches 3 would hide more of it)" if plan.bottleneck == "round-trip" else ""
    yield _line("bottleneck", plan.bottleneck + hint)
    if plan.price_per_million_tokens is not None:
        yield _line("price", f"{plan.price_per_million_tokens:.3g} per million output tokens")


def _prefill_lines(prefill: PrefillPlan | None) -> Iterator[str]:
    if prefill is None:
        return
    load = (
        f"{prefill.prompts_per_second:.3g} prompts/s of {prefill.prompt_len} tokens keep them {prefill.busy:.0%} busy"
    )
    yield _line("prefill workers", f"{prefill.num_prefill_workers}: {load}")
    waits = "grows without end: too few" if prefill.ttft_seconds is None else f"{prefill.ttft_seconds:.3g} s"
    chain = f"{prefill.ttft_chain_seconds:.3g} s on a chain of {len(prefill.parts)}"
    free = f"{prefill.ttft_alone_seconds:.3g} s on one free worker, {chain}"
    yield _line("first token", f"{waits} at that load; {free}")
    tbt, without = prefill.tbt_seconds * 1e3, prefill.tbt_without_seconds * 1e3
    yield _line("between tokens", f"{tbt:.3g} ms ({without:.3g} ms where the S-worker computes the prompts)")


def _speculation_lines(speculation: SpeculationPlan | None, plan: Plan) -> Iterator[str]:
    if speculation is None:
        return
    drafts, tokens = speculation.num_draft_tokens, speculation.tokens_per_verification
    accepted = f"{speculation.acceptance_rate:.0%} are accepted"
    if drafts:
        each = f"{drafts} of each sequence and step, of which {accepted}"
        yield _line("draft tokens", f"{each}: {tokens:.2f} tokens per verification")
        held = ", by their memory" if speculation.r_workers_set_by == "memory" else ""
        fewer = f"{speculation.saved_r_workers} fewer than without{held}"
        rate = f"{speculation.output_tokens_per_second:.0f} output tokens/s"
        yield _line("with them", f"{speculation.num_r_workers} R-worker(s), {fewer}, suffice for {rate}")
    else:
        yield _line("draft tokens", f"where {accepted}, they save no R-worker")
    if speculation.gain_draft_tokens:
        most = f"{speculation.gain:.2f} x the tokens/s with {speculation.gain_draft_tokens} of each sequence"
        yield _line("or", f"all {plan.num_r_workers} R-worker(s), for {most}")
    else:
        yield _line("", f"with all {plan.num_r_workers} R-worker(s) they add no tokens/s")


def _alone(inputs: PlanInputs, alone: GpuOnly | None) -> str:
    if alone is None:
        return ""
    price = inputs.planner.prices.per_million_tokens(0, alone.output_tokens_per_second)
    paid = f", {price:.3g} per million" if price is not None else ""
    batch = f"batch {alone.max_batch_size} (limited by {alone.limited_by})"
    return _line("GPU alone", f"{batch}, {alone.output_tokens_per_second:.0f} output tokens/s{paid}")


def _candidates(plan: Plan) -> Iterator[str]:
    price = "price/1M" if plan.price_per_million_tokens is not None else ""
    yield f"  R-workers  hosts   step ms  tokens/s  S busy  R busy  bottleneck  {price:>9s}".rstrip()
    for row in plan.candidates:
        mark = "*" if row.num_r_workers == plan.num_r_workers else " "
        busy = f"{row.s_busy:7.0%} {row.r_busy:7.0%}"
        yield (
            f"{mark} {row.num_r_workers:9d} {row.num_hosts:6d} {row.step_seconds * 1e3:9.1f} "
            f"{row.output_tokens_per_second:9.0f} {busy}  {_limit(row):11s} {_price(row):>9s}"
        ).rstrip()


def _limit(row: Candidate) -> str:
    return row.bottleneck if row.fits_memory else "no memory"


def _price(row: Candidate) -> str:
    return "" if row.price_per_million_tokens is None else f"{row.price_per_million_tokens:.3g}"


def _line(name: str, text: str) -> str:
    return f"  {name:18s}{text}"
