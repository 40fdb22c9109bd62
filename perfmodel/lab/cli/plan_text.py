"""The printed answer of ``fastdecode plan``: the verdict, both ways side by side, the plan, and its assumptions."""

from __future__ import annotations

import math
from collections.abc import Iterator

from fastdecode.perfmodel.lab.cli.plan_answer import PlanAnswer
from fastdecode.perfmodel.lab.cli.variants import VARIANTS
from fastdecode.perfmodel.lab.cli.variants.variant import BY_LIMITS, Line, PlanCase
from fastdecode.perfmodel.lab.verdict import milliseconds, users
from fastdecode.perfmodel.service import Service
from fastdecode.perfmodel.sizing import Plan


def plan_text(answer: PlanAnswer) -> str:
    """Return the plan as printed text."""
    case, found = answer.case, answer.found
    features = [(variant, found[variant.name]) for variant in VARIANTS if variant.name in found]
    lines = [*_figures(case), *(line for each, figures in features for line in each.lines(case, figures))]
    tables = ["\n".join(each.table(case, figures)) for each, figures in features]
    blocks = [
        "\n".join((answer.verdict.sentence, *_in_words(answer))),
        _title(case),
        "\n".join(_side_by_side(answer)),
        "\n".join(f"  {name:18s}{text}" for name, text in lines),
        "" if case.inputs.one_host else "\n".join(_candidates(case.plan)),
        *tables,
        "\n".join(("Rests on:", *(f"  {line}" for line in case.inputs.assumptions))),
    ]
    return "\n\n".join(block for block in blocks if block)


def _in_words(answer: PlanAnswer) -> Iterator[str]:
    """Yield sentences about what the plan needs, and what the limits cost."""
    plan = answer.case.plan
    gpus = answer.case.inputs.gpu_name
    yield f"FastDecode needs {f'{gpus} and ' if gpus else ''}{_hosts(plan, answer.case.inputs.host_name)}."
    yield _cost(answer)
    unlimited = answer.unlimited
    if unlimited:
        rate = unlimited.output_tokens_per_second
        yield (
            f"The limit ({answer.case.limits}) costs throughput: without it FastDecode gives {rate:,.0f} tokens/s, at "
            f"{milliseconds(unlimited.step_seconds)} per token for each of {users(unlimited.in_flight)}, with "
            f"{_hosts(unlimited, '')} (--tpot inf; the default is 100 ms)."
        )


def _cost(answer: PlanAnswer) -> str:
    """Return the price of a million tokens either way."""
    own, alone = answer.service.price_per_million_tokens, answer.alone_service
    other = alone.price_per_million_tokens if alone else None
    if own is None and other is None:
        return "Prices are not known: --gpu-price and --cpu-price take those of an hour of a GPU and of a host."
    words = {"with FastDecode": own, "with the GPU alone": other}
    unit, by = (" USD", ", by list prices") if answer.uses_list_prices else ("", "")
    costs = [f"{price:.3g}{unit} {way}" for way, price in words.items() if price is not None]
    if own and other:
        by += f": {own / other:.2g} x the price" if own > other else f": {own / other:.2g} of the price"
    host = answer.case.inputs.host_name or "hosts"
    missing = f" (the price of {host} is not known: --cpu-price)" if own is None else ""
    if own and answer.uses_list_prices:
        missing = " (--cpu-price 0 for hosts that you own)"
    return f"A million output tokens cost {' and '.join(costs)}{by}{missing}."


def _hosts(plan: Plan, name: str) -> str:
    """Return how many hosts and R-workers a plan needs."""
    hosts = f"{plan.num_hosts} host{'s' * (plan.num_hosts != 1)}{f' ({name})' if name else ''}"
    return f"{hosts} with {plan.total_r_workers} R-worker{'s' * (plan.total_r_workers != 1)}"


def _side_by_side(answer: PlanAnswer) -> Iterator[str]:
    """Yield a table of both ways: figures of all users, and of each."""
    ways: list[tuple[str, Service | None]] = [("FastDecode", answer.service)]
    if answer.alone:
        ways.append(("GPU alone", answer.alone_service))
    yield f"  {'':26s}" + "".join(f"{name:>14s}" for name, _ in ways)
    for name, text in ROWS:
        cells = ["-" if service is None else text(service) for _, service in ways]
        if any(cell != "-" for cell in cells):
            yield f"  {name:26s}" + "".join(f"{cell:>14s}" for cell in cells)
    if answer.alone:
        yield f"  {'':26s}{'':14s}{'(limited by ' + answer.alone.limited_by + ')':>14s}"


def _first_token(service: Service) -> str:
    return "-" if math.isinf(service.ttft_seconds) else f"{service.ttft_seconds:.3g}"


def _price(service: Service) -> str:
    price = service.price_per_million_tokens
    return "-" if price is None else f"{price:.3g}"


ROWS = (
    ("users served at once", lambda service: f"{service.users:,}"),
    ("tokens/s in all", lambda service: f"{service.tokens_per_second:,.4g}"),
    ("tokens/s for each user", lambda service: f"{service.tokens_per_second_per_user:.3g}"),
    ("ms per token (TPOT)", lambda service: milliseconds(service.tpot_seconds).removesuffix(" ms")),
    ("s to the first token (TTFT)", _first_token),
    ("price of a million tokens", _price),
)
"""Rows of the table of both ways, with the text of each figure."""


def _title(case: PlanCase) -> str:
    workload, inputs = case.planner.workload, case.inputs
    lengths = f"{workload.prompt_len:g} prompt + {workload.output_len:g} output tokens"
    dtype = f", {inputs.kv_cache_dtype} cache" if inputs.kv_cache_dtype != "auto" else ""
    return f"{inputs.title}: {lengths}{dtype}"


def _binding(plan: Plan) -> str:
    """Return what limits R-workers, and by how much."""
    if plan.r_workers_arithmetic_over_reads is None:
        return ""
    more = plan.r_workers_arithmetic_over_reads
    if more > 1:
        return f" (arithmetic binds: {more:.2g} times the seconds of reading)"
    return f" (reads bind: arithmetic takes {more:.2g} times their seconds)"


def _figures(case: PlanCase) -> Iterator[Line]:
    plan = case.plan
    taking_turns = f"{plan.num_mini_batches} of them: {plan.in_flight} in flight"
    yield "mini-batch size", f"{plan.mini_batch_size}, {taking_turns}"
    reading = plan.r_worker_bandwidth_gb_per_s
    each = f", each reading {reading:.1f} GB/s of KV" if reading else ""
    each += _binding(plan)
    # Reasons for a number of R-workers other than keeping up with the S-worker
    reasons = {"memory": " (more for their memory)", "pool": " (as given)", BY_LIMITS: " (more for the limits)"}
    why = " (those of this host)" if case.inputs.one_host else reasons.get(plan.r_workers_set_by, "")
    ranks = plan.tensor_parallel_size
    of_each = f" of each of {ranks} ranks, {plan.total_r_workers} in all" if ranks > 1 else ""
    needed = f"{plan.num_r_workers_exact:.2f} by the equations, before rounding and limits"
    yield "R-workers", f"{plan.num_r_workers}{of_each}{why}, {needed}{each}"
    yield "hosts", f"{plan.num_hosts}"
    yield "schedule", f"{plan.micro_batch_size} sequences start every {plan.interval_steps} steps"
    yield "KV load limit", f"{plan.kv_load_limit} cached tokens attended in a step"
    yield "step", f"{plan.step_seconds * 1e3:.1f} ms, S busy {plan.s_busy:.0%}, R busy {plan.r_busy:.0%}"
    yield "sequence", f"{plan.sequence_seconds:.1f} s"
    hint = " (--num-mini-batches 3 would hide more of it)" if plan.bottleneck == "round-trip" else ""
    yield "bottleneck", plan.bottleneck + hint


def _candidates(plan: Plan) -> Iterator[str]:
    price = "price/1M" if plan.price_per_million_tokens is not None else ""
    yield f"  R-workers  hosts   TPOT ms  tokens/s  S busy  R busy  bottleneck  {price:>9s}".rstrip()
    for row in plan.candidates:
        mark = "*" if row.num_r_workers == plan.num_r_workers else " "
        busy = f"{row.s_busy:7.0%} {row.r_busy:7.0%}"
        limit = row.bottleneck if row.fits_memory else "no memory"
        price = "" if row.price_per_million_tokens is None else f"{row.price_per_million_tokens:.3g}"
        yield (
            f"{mark} {row.num_r_workers:9d} {row.num_hosts:6d} {row.step_seconds * 1e3:9.1f} "
            f"{row.output_tokens_per_second:9.0f} {busy}  {limit:11s} {price:>9s}"
        ).rstrip()
