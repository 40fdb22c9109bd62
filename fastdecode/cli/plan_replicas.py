"""What two copies of each sequence cost, and what a lost R-worker costs with one and with two: for ``plan``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fastdecode.core.errors import PlanError
from fastdecode.perfmodel.plan import Plan
from fastdecode.perfmodel.planner import Planner


@dataclass(frozen=True)
class CopiesNeed:
    """What a number of copies needs, ``memory_r_workers`` of the R-workers for memory alone, and gives."""

    num_r_workers: int
    memory_r_workers: int
    num_hosts: int
    output_tokens_per_second: float
    price_per_million_tokens: float | None


@dataclass(frozen=True)
class ReplicaPlan:
    """``kv_replicas`` is the plan's. ``one`` and ``two`` copies; where there is no plan with two, ``lacks`` says why.

    ``link_growth``: of bytes on the way to R-workers; None where the model is not known. A lost R-worker leaves
    ``speed_after_loss`` of the speed, None where it was the only one; with one copy ``lost_sequences`` stop until
    ``recomputed_tokens`` are computed again, which takes the S-worker ``recompute_seconds`` at least; with two copies
    all these are 0.
    """

    kv_replicas: int
    one: CopiesNeed
    two: CopiesNeed | None
    link_growth: float | None
    lost_sequences: float
    recomputed_tokens: float
    recompute_seconds: float
    speed_after_loss: float | None
    lacks: str | None = None


def plan_replicas(planner: Planner, plan: Plan) -> ReplicaPlan:
    """For ``plan``, which is ``planner``'s, of sequences without ranges."""
    two, lacks = None, None
    try:
        two = _need(planner, plan, 2)
    except PlanError as error:
        lacks = str(error)
    has_one = plan.kv_replicas == 1
    tokens = planner.recomputed_tokens(plan.in_flight, plan.num_r_workers) if has_one else 0.0
    return ReplicaPlan(
        kv_replicas=plan.kv_replicas,
        one=_need(planner, plan, 1),
        two=two,
        link_growth=planner.link_growth(),
        lost_sequences=plan.in_flight / plan.num_r_workers if has_one else 0.0,
        recomputed_tokens=tokens,
        recompute_seconds=planner.num_layers * planner.s_part.layer_seconds(tokens) if has_one else 0.0,
        speed_after_loss=_speed_after_loss(planner, plan),
        lacks=lacks,
    )


def _need(planner: Planner, plan: Plan, kv_replicas: int) -> CopiesNeed:
    planner = replace(planner, kv_replicas=kv_replicas)
    plan = planner.plan(plan.mini_batch_size)
    return CopiesNeed(
        plan.num_r_workers, planner.memory_r_workers(plan.in_flight), plan.num_hosts, plan.output_tokens_per_second,
        plan.price_per_million_tokens,
    )  # fmt: skip


def replica_lines(replicas: ReplicaPlan) -> Iterator[tuple[str, str]]:
    """Name and text of each line: what two copies cost, and what a loss costs."""
    yield "copies", _cost(replicas)
    yield "a lost R-worker", _loss(replicas)


def _cost(replicas: ReplicaPlan) -> str:
    one, two = replicas.one, replicas.two
    what = "1 of each sequence; 2 (--kv-replicas 2)" if replicas.kv_replicas == 1 else "2 of each sequence"
    if two is None:
        return f"{what}: {replicas.lacks}"
    memory = f"memory x 2 ({two.memory_r_workers} R-worker(s) for {one.memory_r_workers})"
    needs = f"{memory}, {two.num_r_workers} R-worker(s) for {one.num_r_workers} in all"
    link = "" if replicas.link_growth is None else f", link +{replicas.link_growth:.0%}"
    speed = f", {two.output_tokens_per_second / one.output_tokens_per_second:.3g} x the tokens/s"
    prices = one.price_per_million_tokens, two.price_per_million_tokens
    paid = "" if None in prices else f", {prices[1]:.3g} per million for {prices[0]:.3g}"
    host = "; both on one host" if two.num_hosts == 1 else ""
    return f"{what}: {needs}{link}{speed}{paid}{host}"


def _loss(replicas: ReplicaPlan) -> str:
    left = replicas.speed_after_loss
    rest = "nothing is left until it is replaced" if left is None else f"{left:.0%} of the speed until it is replaced"
    if replicas.kv_replicas == 2:
        return f"nothing is computed again; {rest}"
    return (
        f"{replicas.lost_sequences:.0f} sequences wait for {replicas.recomputed_tokens:.0f} tokens to be computed "
        f"again, at least {replicas.recompute_seconds:.3g} s of the S-worker; {rest}"
    )


def _speed_after_loss(planner: Planner, plan: Plan) -> float | None:
    """Of tokens per second, with one R-worker less and the same sequences in flight."""
    if plan.num_r_workers == 1:
        return None
    left = planner.candidate(plan.mini_batch_size, plan.num_r_workers - 1)
    return left.output_tokens_per_second / plan.output_tokens_per_second
