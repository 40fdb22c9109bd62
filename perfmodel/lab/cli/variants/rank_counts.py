"""Ranks in a plan: one, two and four, compared."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from fastdecode.core.errors import PlanError
from fastdecode.perfmodel.lab.cli.variants.variant import PlanCase, Variant

COMPARED = (1, 2, 4)
"""Numbers of ranks that every plan of a named GPU and model compares."""


@dataclass(frozen=True)
class RankPlan:
    """The plan of ``tensor_parallel_size`` ranks in short, or in ``lacks`` why there is none (all else is then 0)."""

    tensor_parallel_size: int
    mini_batch_size: int = 0
    num_r_workers: int = 0
    total_r_workers: int = 0
    num_hosts: int = 0
    step_seconds: float = 0.0
    output_tokens_per_second: float = 0.0
    price_per_million_tokens: float | None = None
    lacks: str | None = None


class RankVariant(Variant[tuple[RankPlan, ...]]):
    """Ranks that share the model (``--tensor-parallel-size``). The mini-batch is chosen for each count."""

    name = "tensor_parallel"

    def figures(self, case: PlanCase) -> tuple[RankPlan, ...]:
        """Return the plans of COMPARED and of the requested number.

        There are none without a named GPU and model, since nothing else tells the time of other ranks. Nor are there on
        one host, whose GPUs are fixed.
        """
        args = case.args
        if not (args.gpu and args.model) or args.profile or case.inputs.one_host:
            return ()
        return tuple(_rank_plan(args, count) for count in sorted({*COMPARED, args.tensor_parallel_size}))

    def table(self, case: PlanCase, figures: tuple[RankPlan, ...]) -> Iterator[str]:
        """Yield a row per plan, with the plan's own marked."""
        if not figures:
            return
        priced = any(row.price_per_million_tokens is not None for row in figures)
        yield f"  ranks  mini-batch  R-workers  hosts   TPOT ms  tokens/s  {'price/1M' if priced else '':>9s}".rstrip()
        for row in figures:
            mark = "*" if row.tensor_parallel_size == case.plan.tensor_parallel_size else " "
            if row.lacks:
                yield f"{mark} {row.tensor_parallel_size:5d}  {row.lacks}"
                continue
            price = "" if row.price_per_million_tokens is None else f"{row.price_per_million_tokens:.3g}"
            yield (
                f"{mark} {row.tensor_parallel_size:5d} {row.mini_batch_size:11d} {row.total_r_workers:10d} "
                f"{row.num_hosts:6d} {row.step_seconds * 1e3:9.1f} {row.output_tokens_per_second:9.0f}  {price:>9s}"
            ).rstrip()


def _rank_plan(args: argparse.Namespace, count: int) -> RankPlan:
    try:
        plan = PlanCase.of(argparse.Namespace(**vars(args) | {"tensor_parallel_size": count})).plan
    except PlanError as error:
        return RankPlan(count, lacks=str(error))
    return RankPlan(
        count, plan.mini_batch_size, plan.num_r_workers, plan.total_r_workers, plan.num_hosts, plan.step_seconds,
        plan.output_tokens_per_second, plan.price_per_million_tokens,
    )  # fmt: skip
