"""One, two and four ranks beside each other, for ``fastdecode plan``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fastdecode.cli.machine_inputs import PlanInputs, read_inputs
from fastdecode.core.errors import PlanError
from fastdecode.perfmodel.plan import Plan

COMPARED = (1, 2, 4)


@dataclass(frozen=True)
class RankPlan:
    """The plan of ``tensor_parallel_size`` ranks in short, or in ``lacks`` why there is none (then all else is 0)."""

    tensor_parallel_size: int
    mini_batch_size: int = 0
    num_r_workers: int = 0
    total_r_workers: int = 0
    num_hosts: int = 0
    step_seconds: float = 0.0
    output_tokens_per_second: float = 0.0
    price_per_million_tokens: float | None = None
    lacks: str | None = None


def compare_ranks(
    args: argparse.Namespace, mini_batch_size: Callable[[argparse.Namespace, PlanInputs], int]
) -> tuple[RankPlan, ...]:
    """COMPARED and what ``args`` asks for, each with the mini-batch that the same flags choose for it.

    Nothing where no GPU and model are named: then nothing says what other ranks would take.
    """
    if not (args.gpu and args.model) or args.profile:
        return ()
    counts = sorted({*COMPARED, args.tensor_parallel_size})
    return tuple(
        _rank_plan(argparse.Namespace(**vars(args) | {"tensor_parallel_size": n}), mini_batch_size) for n in counts
    )


def rank_lines(rows: Sequence[RankPlan], chosen: int) -> Iterator[str]:
    """A table; the plan's own row is marked."""
    if not rows:
        return
    priced = any(row.price_per_million_tokens is not None for row in rows)
    yield f"  ranks  mini-batch  R-workers  hosts   step ms  tokens/s  {'price/1M' if priced else '':>9s}".rstrip()
    for row in rows:
        mark = "*" if row.tensor_parallel_size == chosen else " "
        if row.lacks:
            yield f"{mark} {row.tensor_parallel_size:5d}  {row.lacks}"
            continue
        price = "" if row.price_per_million_tokens is None else f"{row.price_per_million_tokens:.3g}"
        yield (
            f"{mark} {row.tensor_parallel_size:5d} {row.mini_batch_size:11d} {row.total_r_workers:10d} "
            f"{row.num_hosts:6d} {row.step_seconds * 1e3:9.1f} {row.output_tokens_per_second:9.0f}  {price:>9s}"
        ).rstrip()


def _rank_plan(args: argparse.Namespace, mini_batch_size: Callable[[argparse.Namespace, PlanInputs], int]) -> RankPlan:
    try:
        inputs = read_inputs(args)
        plan: Plan = inputs.planner.plan(mini_batch_size(args, inputs))
    except PlanError as error:
        return RankPlan(args.tensor_parallel_size, lacks=str(error))
    return RankPlan(
        args.tensor_parallel_size, plan.mini_batch_size, plan.num_r_workers, plan.total_r_workers, plan.num_hosts,
        plan.step_seconds, plan.output_tokens_per_second, plan.price_per_million_tokens,
    )  # fmt: skip
