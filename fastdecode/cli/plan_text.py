"""A plan as people read it."""

from __future__ import annotations

from collections.abc import Iterator

from fastdecode.cli.plan_inputs import PlanInputs
from fastdecode.perfmodel.gpu_only import GpuOnly
from fastdecode.perfmodel.plan import Candidate, Plan
from fastdecode.perfmodel.verdict import Verdict


def plan_text(inputs: PlanInputs, plan: Plan, alone: GpuOnly | None, verdict: Verdict) -> str:
    """The figures, the GPU alone, the verdict, the candidates and what all of it rests on."""
    blocks = [_title(inputs), "\n".join(_figures(plan)), _alone(inputs, alone), verdict.sentence]
    blocks += ["\n".join(_candidates(plan)), "\n".join(("Rests on:", *(f"  {line}" for line in inputs.assumptions)))]
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
    yield _line("R-workers", f"{plan.num_r_workers}{why}, {plan.num_r_workers_exact:.2f} exactly{each}")
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
