"""The text of a plan: its figures, the lines of its features, the GPU alone, the verdict and the candidates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fastdecode.cli.variants import VARIANTS
from fastdecode.cli.variants.variant import Line, PlanCase
from fastdecode.perfmodel.gpu_only import GpuOnly, Verdict
from fastdecode.perfmodel.sizing import Plan


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


def _figures(plan: Plan) -> Iterator[Line]:
    taking_turns = f"{plan.num_mini_batches} of them: {plan.in_flight} in flight"
    yield "mini-batch size", f"{plan.mini_batch_size}, {taking_turns}"
    reading = plan.r_worker_bandwidth_gb_per_s
    each = f", each reading {reading:.1f} GB/s of KV" if reading else ""
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
