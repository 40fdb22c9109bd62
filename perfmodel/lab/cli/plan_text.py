"""The printed answer of ``fastdecode plan``: the verdict, both ways side by side, the plan, and its assumptions."""

from __future__ import annotations

import math
from collections.abc import Iterator

from fastdecode.perfmodel.lab.cli.plan_answer import PlanAnswer
from fastdecode.perfmodel.lab.cli.variants import VARIANTS
from fastdecode.perfmodel.lab.cli.variants.variant import BY_LIMITS, Line, PlanCase, mini_batch_counts
from fastdecode.perfmodel.lab.gpu_only import fewest_gpus
from fastdecode.perfmodel.lab.verdict import milliseconds, users
from fastdecode.perfmodel.service import NO_LIMITS, Service
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
    needs = f"{f'{gpus} and ' if gpus else ''}{_hosts(plan, answer.case.inputs.host_name)}"
    yield f"FastDecode needs {needs}{_fewer_alone(answer)}{_as_many(answer)}."
    yield _cost(answer)
    unlimited = answer.unlimited
    if unlimited:
        rate = unlimited.output_tokens_per_second
        yield (
            f"The limit of {asked_limits(answer.case)} costs throughput: without it FastDecode gives {rate:,.0f} "
            f"tokens/s, at {milliseconds(unlimited.step_seconds)} per token for each of {users(unlimited.in_flight)}, "
            f"with {_hosts(unlimited, '')} (--tpot inf)."
        )


def _fewer_alone(answer: PlanAnswer) -> str:
    """Return the GPUs that hold the weights packed, where that is fewer: the S-worker unpacks them."""
    server = answer.case.inputs.server
    fewest = fewest_gpus(server.shape, server.gpu, server.group) if server else None
    if not fewest or fewest >= answer.case.plan.tensor_parallel_size:
        return ""
    return f" (its S-worker unpacks the weights; {fewest} such GPU{'s' * (fewest > 1)} alone hold them packed)"


def _as_many(answer: PlanAnswer) -> str:
    """Return the GPUs alone that give as many tokens per second, or else those that can run such a sequence."""
    alone, gpu = answer.alone_service, answer.case.inputs.gpu_name
    if not gpu or answer.case.inputs.one_host:
        return ""
    if not alone:
        able = [row for row in answer.found.get("tensor_parallel", ()) if row.alone_step_seconds]
        return "".join(
            f"; {row.tensor_parallel_size} GPUs alone serve {users(row.alone_users)} at "
            f"{milliseconds(row.alone_step_seconds)} per token, {row.alone_tokens_per_second:,.0f} tokens/s in all"
            for row in able[:1]
        )
    servers = math.ceil(answer.service.tokens_per_second / alone.tokens_per_second)
    if servers < 2:
        return ""
    each = f"at {milliseconds(alone.tpot_seconds)} per token"
    return f"; {servers:,} servers of {gpu} alone give as many tokens per second, {each}"


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
    missing = "" if own else f" (the price of {host} is not known: --cpu-price; 0 for hosts that you own)"
    if own and answer.uses_list_prices and not answer.case.inputs.one_host:
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
        ranks = answer.case.plan.tensor_parallel_size
        ways.append(("GPU alone" if ranks == 1 else f"{ranks} GPUs alone", answer.alone_service))
    yield f"  {'':26s}" + "".join(f"{name:>18s}" for name, _ in ways)
    for name, text in ROWS:
        cells = ["-" if service is None else text(service) for _, service in ways]
        if any(cell != "-" for cell in cells):
            yield f"  {name:26s}" + "".join(f"{cell:>18s}" for cell in cells)
    longest = {
        "s-worker": "S-worker's work",
        "r-workers": "R-workers' reads",
        "transport": "the link",
        "round-trip": "the way and back",
    }
    own = "time per token" if answer.unlimited else longest[answer.case.plan.bottleneck]
    bounds = [own, *([answer.alone.limited_by] if answer.alone else [])]
    yield f"  {'bounded by':26s}" + "".join(f"{bound:>18s}" for bound in bounds)


def asked_limits(case: PlanCase) -> str:
    """Return the limits on users' times in words, and whose they are."""
    default = case.args.tpot is None and math.isfinite(case.limits.tpot_seconds)
    return f"{case.limits}{' (the default of --tpot)' if default else ''}"


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
    if not workload.prompt_len:
        lengths = f"{workload.output_len:g} output tokens after an empty prompt (--prompt-len says how many are given)"
    dtype = f", {inputs.kv_cache_dtype} cache" if inputs.kv_cache_dtype != "auto" else ""
    limits = "" if case.limits == NO_LIMITS else f"; at most {asked_limits(case)}"
    return f"{inputs.title}: {lengths}{dtype}{limits}"


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
    yield "mini-batches", _mini_batches(case)
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
    start = "sequence starts" if plan.micro_batch_size == 1 else "sequences start"
    yield "schedule", f"{plan.micro_batch_size} {start} every {plan.interval_steps} steps"
    yield "KV load limit", f"{plan.kv_load_limit} cached tokens attended in a step"
    yield "step", f"{plan.step_seconds * 1e3:.1f} ms, S busy {plan.s_busy:.0%}, R busy {plan.r_busy:.0%}"
    yield "sequence", f"{plan.sequence_seconds:.1f} s"
    yield "bottleneck", plan.bottleneck


def _mini_batches(case: PlanCase) -> str:
    """Say how many mini-batches take turns, and why not another number."""
    plan, tried = case.plan, mini_batch_counts(case.args)
    turns = f"{plan.num_mini_batches} of {plan.mini_batch_size} sequences, {plan.in_flight} in flight"
    others = [str(each) for each in sorted(tried) if each != plan.num_mini_batches]
    if others:
        worse = "give no more within the limit" if case.keeps_limits else "are no faster"
        return f"{turns}; {' and '.join(others)} {worse}"
    hint = plan.bottleneck == "round-trip" and case.args.num_mini_batches is None and plan.num_mini_batches < 3
    return f"{turns}{'; --num-mini-batches 3 would hide more of the way there and back' * hint}"


def _candidates(plan: Plan) -> Iterator[str]:
    price = "price/1M" if plan.price_per_million_tokens is not None else ""
    of_each = f", R-workers of each of {plan.tensor_parallel_size} ranks" if plan.tensor_parallel_size > 1 else ""
    yield f"Other numbers of R-workers for the same users (* is this plan){of_each}:"
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
