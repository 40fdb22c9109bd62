"""Copies in a plan: the cost of two copies per sequence, and of a lost R-worker with one copy and with two."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from fastdecode.core.errors import PlanError
from fastdecode.perfmodel.lab.cli.variants.variant import BY_LIMITS, Line, PlanCase, Variant
from fastdecode.perfmodel.lab.planner import Planner
from fastdecode.perfmodel.lab.verdict import digits
from fastdecode.perfmodel.sizing import Plan

RESTART_SECONDS = 60.0
"""Seconds until a lost R-worker is replaced, as in `simulate` without ``--restart-seconds``."""


@dataclass(frozen=True)
class CopiesNeed:
    """Figures of a plan with one or two copies of each sequence. ``memory_r_workers``: enough to hold these copies."""

    num_r_workers: int
    memory_r_workers: int
    num_hosts: int
    output_tokens_per_second: float
    price_per_million_tokens: float | None


@dataclass(frozen=True)
class ReplicaPlan:
    """Plans with one and with two copies of each sequence. ``kv_replicas``: the chosen number of copies.

    ``one``, ``two``: the plans; ``lacks``: why there is no plan with two. ``link_growth``: growth of the bytes to
    R-workers; None if the model is unknown. ``speed_after_loss``: tokens per second with one R-worker less, as a
    fraction; None if there was only one. With one copy, ``lost_sequences`` stop until ``recomputed_tokens`` are
    recomputed, which takes the S-worker at least ``recompute_seconds``; with two copies these three are 0.
    ``lost_tokens_per_second_at_one_hour``: output tokens per second that losses cost if each R-worker is lost once an
    hour on average, and replaced after ``RESTART_SECONDS``. An MTBF of h hours costs one h-th of that.
    """

    kv_replicas: int
    one: CopiesNeed
    two: CopiesNeed | None
    link_growth: float | None
    lost_sequences: float
    recomputed_tokens: float
    recompute_seconds: float
    speed_after_loss: float | None
    lost_tokens_per_second_at_one_hour: float
    lacks: str | None = None


class CopyVariant(Variant[ReplicaPlan]):
    """Two copies of each sequence (``--kv-replicas 2``), compared with one."""

    name = "replicas"

    def figures(self, case: PlanCase) -> ReplicaPlan:
        """Return the plans with one and with two copies, and the cost of losing an R-worker."""
        planner, plan = case.planner, case.plan
        two, lacks = None, None
        try:
            two = _need(case, 2)
        except PlanError as error:
            lacks = str(error)
        has_one = plan.kv_replicas == 1
        tokens = _recomputed_tokens(case) if has_one else 0.0
        recompute = planner.num_layers * planner.s_part.layer_seconds(tokens) if has_one else 0.0
        speed = _speed_after_loss(case)
        return ReplicaPlan(
            kv_replicas=plan.kv_replicas,
            one=_need(case, 1),
            two=two,
            link_growth=_link_growth(planner),
            lost_sequences=_lost_sequences(case) if has_one else 0.0,
            recomputed_tokens=tokens,
            recompute_seconds=recompute,
            speed_after_loss=speed,
            lost_tokens_per_second_at_one_hour=_lost_in_an_hour(plan, recompute, speed),
            lacks=lacks,
        )

    def lines(self, case: PlanCase, figures: ReplicaPlan) -> Iterator[Line]:
        """Yield the cost of two copies, and of a lost R-worker; nothing on one host, which fails as a whole."""
        if case.inputs.one_host:
            return
        yield "copies", _cost(figures)
        yield "a lost R-worker", _loss(figures)
        lost, rate = figures.lost_tokens_per_second_at_one_hour, case.plan.output_tokens_per_second
        yield (
            "losses cost",
            f"{digits(lost, 3)} of {digits(rate)} tokens/s if each R-worker fails once an hour; "
            f"{lost / 720:.2g} if once a month",
        )

    def s_flags(self, case: PlanCase, figures: ReplicaPlan) -> dict[str, object]:
        """Return the number of copies, if it is not the engine's default."""
        return {"--kv-replicas": figures.kv_replicas} if figures.kv_replicas > 1 else {}


def _need(case: PlanCase, kv_replicas: int) -> CopiesNeed:
    planner = replace(case.planner, placing=replace(case.planner.placing, copies=kv_replicas))
    if case.plan.r_workers_set_by == BY_LIMITS:  # keep the plan's R-workers, unless copies need more memory
        enough = max(case.plan.num_r_workers, planner.memory_r_workers(case.plan.in_flight))
        planner = replace(planner, num_r_workers=enough)
    plan = planner.plan(case.plan.mini_batch_size)
    return CopiesNeed(
        plan.num_r_workers, planner.memory_r_workers(plan.in_flight), plan.num_hosts, plan.output_tokens_per_second,
        plan.price_per_million_tokens,
    )  # fmt: skip


def _lost_sequences(case: PlanCase) -> float:
    """Return how many sequences have a range, or their whole cache, on any one R-worker."""
    in_flight, planner = case.plan.in_flight, case.planner
    ranges = max(1, math.ceil(planner.workload.mean_context / planner.placing.segment_tokens))
    return min(in_flight, in_flight * ranges / case.plan.num_r_workers)


def _recomputed_tokens(case: PlanCase) -> float:
    """Return the number of tokens that only a lost R-worker held. A shared prefix is also on other R-workers."""
    workload, plan = case.planner.workload, case.plan
    return plan.in_flight / plan.num_r_workers * (workload.mean_context - workload.shared_prefix_len)


def _link_growth(planner: Planner) -> float | None:
    """Return the bytes that second copies add to the link, as a fraction of the other bytes; None if unknown."""
    row_bytes = planner.transport.row_bytes
    return planner.storage.copied_bytes / row_bytes if row_bytes else None


def _lost_in_an_hour(plan: Plan, recompute_seconds: float, speed_after_loss: float | None) -> float:
    """Return the output tokens per second that losses cost, if each R-worker is lost once an hour."""
    seconds_of_each = recompute_seconds + RESTART_SECONDS * (1.0 - (speed_after_loss or 0.0))
    losses_per_second = plan.total_r_workers / 3600.0
    return plan.output_tokens_per_second * min(1.0, losses_per_second * seconds_of_each)


def _speed_after_loss(case: PlanCase) -> float | None:
    """Return the tokens per second with one R-worker less and the same sequences, as a fraction of the plan's."""
    if case.plan.num_r_workers == 1:
        return None
    left = case.planner.candidate(case.plan.mini_batch_size, case.plan.num_r_workers - 1)
    return left.output_tokens_per_second / case.plan.output_tokens_per_second


def _cost(replicas: ReplicaPlan) -> str:
    one, two = replicas.one, replicas.two
    copies = (
        "1 of each sequence; a second (--kv-replicas 2)" if replicas.kv_replicas == 1 else "2 of each sequence, which"
    )
    if two is None:
        return f"{copies} cannot be: {replicas.lacks}"
    needs = [f"takes twice the memory{_changed(two.memory_r_workers, one.memory_r_workers, '{} hold it')}"]
    if two.num_r_workers != one.num_r_workers:
        needs.append(f"needs {_r_workers(two.num_r_workers)}, not {one.num_r_workers}")
    if replicas.link_growth is not None:
        needs.append(f"puts {replicas.link_growth:.0%} more bytes on the link")
    speed = f"gives {two.output_tokens_per_second / one.output_tokens_per_second:.3g} x the tokens/s"
    paid = one.price_per_million_tokens, two.price_per_million_tokens
    changed = None not in paid and f"{paid[0]:.3g}" != f"{paid[1]:.3g}"
    price = f" at {paid[1]:.3g}, not {paid[0]:.3g}, per million" if changed else ""
    host = "; both on one host" if two.num_hosts == 1 else ""
    return f"{copies} {', '.join(needs)}, and {speed}{price}{host}"


def _changed(two: int, one: int, words: str) -> str:
    return f" ({words.format(_r_workers(two))}, not {one})" if two != one else ""


def _r_workers(number: int) -> str:
    return f"{number} R-worker{'s' * (number != 1)}"


def _loss(replicas: ReplicaPlan) -> str:
    left = replicas.speed_after_loss
    rest = "nothing is left until it is replaced" if left is None else f"{left:.0%} of the speed until it is replaced"
    if replicas.kv_replicas == 2:
        return f"nothing is computed again; {rest}"
    number = f"{replicas.lost_sequences:.3g}"
    waiting = "1 sequence waits" if number == "1" else f"{number} sequences (the mean) wait"
    return (
        f"{waiting} for {replicas.recomputed_tokens:,.0f} tokens to be computed again, at least "
        f"{replicas.recompute_seconds:.3g} s of the S-worker; {rest}"
    )
