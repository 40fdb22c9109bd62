"""What two copies of each sequence cost and what a lost R-worker costs, with them and without, for ``fastdecode plan``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fastdecode.errors import PlanError
from fastdecode.perfmodel.plan import Plan
from fastdecode.perfmodel.planner import Planner


@dataclass(frozen=True)
class ReplicaPlan:
    """``kv_replicas`` is the plan's. Of one and of two copies, in this order: ``num_r_workers`` that are needed,
    ``memory_r_workers`` of them for memory alone, ``output_tokens_per_second`` and ``price_per_million_tokens``, None
    where prices are not known; of two all of it is None, and ``lacks`` says why, where there is no plan.

    ``link_growth``: of bytes on the way to R-workers; None where the model is not known. ``same_host``: both copies of
    a sequence are on one host. A lost R-worker leaves ``speed_after_loss`` of the speed, None where it was the only
    one; with one copy ``lost_sequences`` stop until ``recomputed_tokens`` are computed again, which takes the S-worker
    ``recompute_seconds`` at least; with two copies all these are 0.
    """

    kv_replicas: int
    num_r_workers: tuple[int, int | None]
    memory_r_workers: tuple[int, int | None]
    output_tokens_per_second: tuple[float, float | None]
    price_per_million_tokens: tuple[float | None, float | None]
    link_growth: float | None
    same_host: bool
    lost_sequences: float
    recomputed_tokens: float
    recompute_seconds: float
    speed_after_loss: float | None
    lacks: str | None = None


def plan_replicas(planner: Planner, plan: Plan) -> ReplicaPlan:
    """For ``plan``, which is ``planner``'s, of sequences without ranges."""
    one = replace(planner, kv_replicas=1)
    first = one.plan(plan.mini_batch_size)
    two, second, lacks = replace(planner, kv_replicas=2), None, None
    try:
        second = two.plan(plan.mini_batch_size)
    except PlanError as error:
        lacks = str(error)
    hosts = second.num_hosts if second else 0
    tokens = one.recomputed_tokens(plan.in_flight, plan.num_r_workers) if plan.kv_replicas == 1 else 0.0
    return ReplicaPlan(
        kv_replicas=plan.kv_replicas,
        num_r_workers=(first.num_r_workers, second and second.num_r_workers),
        memory_r_workers=(one.memory_r_workers(plan.in_flight), second and two.memory_r_workers(plan.in_flight)),
        output_tokens_per_second=(first.output_tokens_per_second, second and second.output_tokens_per_second),
        price_per_million_tokens=(
            first.price_per_million_tokens,
            second.price_per_million_tokens if second else None,
        ),
        link_growth=two.link_growth(),
        same_host=hosts == planner.num_ranks == 1,
        lost_sequences=plan.in_flight / plan.num_r_workers if plan.kv_replicas == 1 else 0.0,
        recomputed_tokens=tokens,
        recompute_seconds=planner.num_layers * planner.s_part.layer_seconds(tokens) if tokens else 0.0,
        speed_after_loss=_speed_after_loss(planner, plan),
        lacks=lacks,
    )


def replica_lines(replicas: ReplicaPlan) -> Iterator[tuple[str, str]]:
    """Name and text of each line: what two copies cost, and what a loss costs."""
    yield "copies", _cost(replicas)
    yield "a lost R-worker", _loss(replicas)


def _cost(replicas: ReplicaPlan) -> str:
    has_two = replicas.kv_replicas == 2
    what = "2 of each sequence" if has_two else "1 of each sequence; 2 (--kv-replicas 2)"
    if replicas.lacks:
        return f"{what}: {replicas.lacks}"
    (one, two), (memory, memory_two) = replicas.num_r_workers, replicas.memory_r_workers
    needs = f"memory x 2 ({memory_two} R-worker(s) for {memory}), {two} R-worker(s) for {one} in all"
    link = "" if replicas.link_growth is None else f", link +{replicas.link_growth:.0%}"
    rate, rate_two = replicas.output_tokens_per_second
    speed = f", {(rate_two or 0.0) / rate:.3g} x the tokens/s"
    price, price_two = replicas.price_per_million_tokens
    paid = "" if price is None or price_two is None else f", {price_two:.3g} per million for {price:.3g}"
    host = "; one host has both" if replicas.same_host else ""
    return f"{what}: {needs}{link}{speed}{paid}{host}"


def _loss(replicas: ReplicaPlan) -> str:
    left = replicas.speed_after_loss
    rest = "nothing is left until it is replaced" if left is None else f"{left:.0%} of the speed until it is replaced"
    if replicas.kv_replicas == 2:
        return f"nothing is computed again; {rest}"
    return (
        f"{replicas.lost_sequences:.0f} sequences wait for {replicas.recomputed_tokens:.0f} tokens to be computed again, "
        f"at least {replicas.recompute_seconds:.3g} s of the S-worker; {rest}"
    )


def _speed_after_loss(planner: Planner, plan: Plan) -> float | None:
    """Of tokens per second, with one R-worker less and the same sequences in flight."""
    if plan.num_r_workers == 1:
        return None
    left = planner.candidate(plan.mini_batch_size, plan.num_r_workers - 1)
    return left.output_tokens_per_second / plan.output_tokens_per_second
