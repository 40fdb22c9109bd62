"""Ranks in a plan: one, two and four, compared."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from fastdecode.core.errors import PlanError
from fastdecode.perfmodel.lab.cli.variants.variant import PlanCase, Variant
from fastdecode.perfmodel.lab.gpu_only import GpuOnly
from fastdecode.perfmodel.service import Service
from fastdecode.perfmodel.sizing import Prices

COMPARED = (1, 2, 4)
"""Numbers of ranks that every plan of a named GPU and model compares."""


@dataclass(frozen=True)
class RankPlan:
    """Main figures of a plan with ``tensor_parallel_size`` ranks. All are 0 if no plan exists; ``lacks`` says why.

    ``alone_…``: figures of as many GPUs without R-workers, within the same limits.
    """

    tensor_parallel_size: int
    mini_batch_size: int = 0
    num_r_workers: int = 0
    total_r_workers: int = 0
    num_hosts: int = 0
    step_seconds: float = 0.0
    output_tokens_per_second: float = 0.0
    price_per_million_tokens: float | None = None
    alone_users: int = 0
    alone_step_seconds: float | None = None
    alone_tokens_per_second: float = 0.0
    in_flight: int = 0
    lacks: str | None = None

    def alone(self, prices: Prices) -> Service | None:
        """Return the service of as many GPUs without R-workers; None if they serve no user. TTFT is unknown: inf."""
        if not self.alone_step_seconds:
            return None
        price = replace(prices, num_gpus=self.tensor_parallel_size).per_million_tokens(0, self.alone_tokens_per_second)
        return Service(self.alone_users, self.alone_tokens_per_second, self.alone_step_seconds, math.inf, price)


class RankVariant(Variant[tuple[RankPlan, ...]]):
    """Plans by the number of ranks that share the model (``--tensor-parallel-size``), each with its best mini-batch."""

    name = "tensor_parallel"

    def figures(self, case: PlanCase) -> tuple[RankPlan, ...]:
        """Return plans with the numbers of ranks in COMPARED, and with the requested number.

        Return () without a named GPU and model, which give the times of other numbers of ranks. Return () on one host,
        whose number of GPUs is fixed.
        """
        args = case.args
        if not (args.gpu and args.model) or args.profile or case.inputs.one_host:
            return ()
        own = args.tensor_parallel_size
        others = {count: _rank_plan(args, count) for count in COMPARED if count != own}
        return tuple(each for _, each in sorted((others | {own: _short(case)}).items()))

    def table(self, case: PlanCase, figures: tuple[RankPlan, ...]) -> Iterator[str]:
        """Yield a row per number of ranks; mark the row of the plan that is printed."""
        if not figures:
            return
        priced = any(row.price_per_million_tokens is not None for row in figures)
        yield "Other numbers of GPUs (* is this plan), each with R-workers, and the same GPUs alone, within the limits:"
        own = f"   GPUs  R-workers  hosts   users   TPOT ms  tokens/s{'   price/1M' if priced else ''}"
        yield f"{own}  |  alone: users   TPOT ms  tokens/s"
        for row in figures:
            mark = "*" if row.tensor_parallel_size == case.plan.tensor_parallel_size else " "
            if row.lacks:
                yield f"{mark} {row.tensor_parallel_size:5d}  {row.lacks}"
                continue
            price = "" if row.price_per_million_tokens is None else f"  {row.price_per_million_tokens:9.3g}"
            alone = "-" if row.alone_step_seconds is None else f"{row.alone_step_seconds * 1e3:.1f}"
            yield (
                f"{mark} {row.tensor_parallel_size:5d} {row.total_r_workers:10d} {row.num_hosts:6d} {row.in_flight:7d} "
                f"{row.step_seconds * 1e3:9.1f} {row.output_tokens_per_second:9.0f}{price}  |  {row.alone_users:12d} "
                f"{alone:>9s} {row.alone_tokens_per_second:9.0f}"
            )


def _rank_plan(args: argparse.Namespace, count: int) -> RankPlan:
    try:
        return _short(PlanCase.of(argparse.Namespace(**vars(args) | {"tensor_parallel_size": count})))
    except PlanError as error:
        return RankPlan(count, lacks=str(error))


def _short(case: PlanCase) -> RankPlan:
    """Return the main figures of a plan, and of as many GPUs without R-workers."""
    plan, limit = case.plan, math.inf if case.args.latency_limit is None else case.args.latency_limit
    alone = case.inputs.server.best(limit, case.limits) if case.inputs.server else GpuOnly(0, 0.0, None, "")
    return RankPlan(
        plan.tensor_parallel_size, plan.mini_batch_size, plan.num_r_workers, plan.total_r_workers, plan.num_hosts,
        plan.step_seconds, plan.output_tokens_per_second, plan.price_per_million_tokens, alone.max_batch_size,
        alone.step_seconds,
        alone.output_tokens_per_second, plan.in_flight,
    )  # fmt: skip
