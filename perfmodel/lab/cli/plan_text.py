"""The printed answer of ``fastdecode plan``: verdict, FastDecode beside the GPU alone, plan, and assumptions."""

from __future__ import annotations

import math
from collections.abc import Iterator

from fastdecode.perfmodel.lab.cli.plan_answer import PlanAnswer
from fastdecode.perfmodel.lab.cli.plan_sentences import asked_limits, sentences
from fastdecode.perfmodel.lab.cli.variants import VARIANTS
from fastdecode.perfmodel.lab.cli.variants.variant import BY_LIMITS, Line, PlanCase, mini_batch_counts
from fastdecode.perfmodel.lab.verdict import digits, milliseconds
from fastdecode.perfmodel.service import NO_LIMITS, Service
from fastdecode.perfmodel.sizing import Plan


def plan_text(answer: PlanAnswer) -> str:
    """Return the plan as printed text."""
    case, found = answer.case, answer.found
    features = [(variant, found[variant.name]) for variant in VARIANTS if variant.name in found]
    lines = [*_figures(case), *(line for each, figures in features for line in each.lines(case, figures))]
    tables = ["\n".join(each.table(case, figures)) for each, figures in features]
    blocks = [
        "\n".join((answer.verdict.sentence, *sentences(answer))),
        _title(case),
        "\n".join(_side_by_side(answer)),
        "\n".join(f"  {name:18s}{text}" for name, text in lines),
        "" if case.inputs.one_host else "\n".join(_candidates(case)),
        *tables,
        "\n".join(("Rests on:", *(f"  {line}" for line in case.inputs.assumptions))),
    ]
    return "\n\n".join(block for block in blocks if block)


def _side_by_side(answer: PlanAnswer) -> Iterator[str]:
    """Yield a table of FastDecode beside the GPU alone: figures of all users, and of each user."""
    ways: list[tuple[str, Service | None]] = [("FastDecode", answer.service)]
    if answer.alone:
        ranks = answer.case.plan.tensor_parallel_size
        ways.append(("GPU alone" if ranks == 1 else f"{ranks} GPUs alone", answer.alone_service))
    if answer.fewest_alone:
        number, service = answer.fewest_alone
        ways.append((f"{number} GPUs alone", service))
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
    by_limit = answer.unlimited and answer.case.keeps_limits
    own = "time per token" if by_limit else longest[answer.case.plan.bottleneck]
    bounds = [own, *([answer.alone.limited_by] if answer.alone else [])]
    yield f"  {'bounded by':26s}" + "".join(f"{bound:>18s}" for bound in bounds)


def _first_token(service: Service) -> str:
    return "-" if math.isinf(service.ttft_seconds) else f"{service.ttft_seconds:.3g}"


def _price(service: Service) -> str:
    price = service.price_per_million_tokens
    return "-" if price is None else f"{price:.3g}"


ROWS = (
    ("users served at once", lambda service: f"{service.users:,}"),
    ("tokens/s in all", lambda service: digits(service.tokens_per_second)),
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
    limits = f"; at most {asked_limits(case)}" if case.keeps_limits else f"; wanted {asked_limits(case)}; not met"
    limits = "" if case.limits == NO_LIMITS else limits
    return f"{inputs.title}: {lengths}{dtype}{limits}"


def _binding(plan: Plan) -> str:
    """Say whether memory reads or arithmetic limit R-workers, and by how much."""
    if plan.r_workers_arithmetic_over_reads is None:
        return ""
    more = plan.r_workers_arithmetic_over_reads
    if more > 1:
        return f" (arithmetic binds: it needs {more:.2g} x the time of reads)"
    return f" (reads bind: arithmetic needs {more:.0%} of the time of reads)"


def _figures(case: PlanCase) -> Iterator[Line]:
    plan = case.plan
    yield "mini-batches", _mini_batches(case)
    reading = plan.r_worker_bandwidth_gb_per_s
    each = f", each reading {reading:.1f} GB/s of KV" if reading else ""
    each += _binding(plan)
    # Why there are more or fewer R-workers than needed to keep up with the S-worker
    more = plan.num_r_workers > math.ceil(plan.num_r_workers_exact)
    reasons = {"memory": "; more for their memory", "pool": "; as given", BY_LIMITS: "; more for the limits" * more}
    why = "; those of this host" if case.inputs.one_host else reasons.get(plan.r_workers_set_by, "")
    ranks = plan.tensor_parallel_size
    of_each = f" of each of {ranks} ranks, {plan.total_r_workers} in all" if ranks > 1 else ""
    needed = f" ({digits(plan.num_r_workers_exact, 3)} by the equations{why})"
    yield "R-workers", f"{plan.num_r_workers}{of_each}{needed}{each}"
    yield "hosts", f"{plan.num_hosts}"
    start = "sequence starts" if plan.micro_batch_size == 1 else "sequences start"
    yield "schedule", f"{plan.micro_batch_size} {start} every {plan.interval_steps} steps"
    yield "KV load limit", f"{plan.kv_load_limit} cached tokens attended in a step"
    yield "step", f"{plan.step_seconds * 1e3:.1f} ms, S busy {plan.s_busy:.0%}, R busy {plan.r_busy:.0%}"
    yield "sequence", f"{plan.sequence_seconds:.1f} s"
    yield "bottleneck", _bottleneck(plan)


def _bottleneck(plan: Plan) -> str:
    """Return the bottleneck; if it is a worker, with the fraction of a step in which this worker is idle."""
    busy = {"s-worker": plan.s_busy, "r-workers": plan.r_busy}.get(plan.bottleneck)
    if busy is None or busy > 0.95:
        return plan.bottleneck
    return f"{plan.bottleneck}; the rest of a step, {1 - busy:.0%}, is transfers and waiting for the other side"


def _mini_batches(case: PlanCase) -> str:
    plan, tried = case.plan, mini_batch_counts(case.args)
    size = f"{plan.mini_batch_size} sequence{'s' * (plan.mini_batch_size != 1)}"
    turns = f"{plan.num_mini_batches} of {size}, {plan.in_flight} in flight"
    others = [str(each) for each in sorted(tried) if each != plan.num_mini_batches]
    if others:
        worse = "give no more within the limit" if case.keeps_limits else "are no faster"
        return f"{turns}; {' and '.join(others)} {worse}"
    hint = plan.bottleneck == "round-trip" and case.args.num_mini_batches is None and plan.num_mini_batches < 3
    return f"{turns}{'; --num-mini-batches 3 would hide more of the way there and back' * hint}"


def _candidates(case: PlanCase) -> Iterator[str]:
    plan = case.plan
    price = "price/1M" if plan.price_per_million_tokens is not None else ""
    of_each = f", R-workers of each of {plan.tensor_parallel_size} ranks" if plan.tensor_parallel_size > 1 else ""
    yield f"Other numbers of R-workers for the same users (* is this plan){of_each}:"
    yield f"  R-workers  hosts   TPOT ms  tokens/s  S busy  R busy  bottleneck  {price:>9s}".rstrip()
    for row in plan.candidates:
        mark = "*" if row.num_r_workers == plan.num_r_workers else " "
        if not row.fits_memory:
            yield f"{mark} {row.num_r_workers:9d} {row.num_hosts:6d}  does not fit: their memory is too small"
            continue
        busy = f"{row.s_busy:7.0%} {row.r_busy:7.0%}"
        price = "" if row.price_per_million_tokens is None else f"{row.price_per_million_tokens:.3g}"
        over = "  over limit" * (row.step_seconds > case.limits.tpot_seconds)
        yield (
            f"{mark} {row.num_r_workers:9d} {row.num_hosts:6d} {row.step_seconds * 1e3:9.1f} "
            f"{row.output_tokens_per_second:9.0f} {busy}  {row.bottleneck:11s} {price:>9s}{over}"
        ).rstrip()
