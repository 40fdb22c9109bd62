"""The picture of a plan: throughput and price against the number of R-workers, the knee marked."""

from __future__ import annotations

import numpy as np

from fastdecode.perfmodel.gpu_only import GpuOnly
from fastdecode.perfmodel.plan import Candidate, Plan
from fastdecode.perfmodel.planner import Planner

MOST_POINTS = 100


def plot_plan(planner: Planner, plan: Plan, alone: GpuOnly | None, path: str) -> None:
    """Draw from one R-worker to twice the plan's as a PNG; OSError when it cannot be written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    rows = plan_curve(planner, plan)
    workers = [row.num_r_workers for row in rows]
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(workers, [row.output_tokens_per_second for row in rows], color="#2f6db5", label="throughput")
    axes.axvline(plan.num_r_workers, color="#9a9a9a", linewidth=0.8)
    axes.plot(plan.num_r_workers, plan.output_tokens_per_second, "o", color="#2f6db5", label="the plan (knee)")
    if alone and alone.max_batch_size:
        axes.axhline(alone.output_tokens_per_second, color="#b5542f", linestyle="--", label="GPU alone")
    axes.set(xlabel="R-workers", ylabel="output tokens/s", ylim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    prices = [row.price_per_million_tokens for row in rows if row.price_per_million_tokens is not None]
    if prices:
        right = axes.twinx()
        right.plot(workers, prices, color="#4a9a5b", label="price")
        right.set(ylabel="price per million output tokens", ylim=(0, None))
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    figure.savefig(path, dpi=120, format="png")
    pyplot.close(figure)


def plan_curve(planner: Planner, plan: Plan) -> list[Candidate]:
    """The candidates of the picture."""
    workers = np.unique(np.linspace(1, 2 * plan.num_r_workers, MOST_POINTS).round().astype(int))
    return [planner.candidate(plan.mini_batch_size, int(number)) for number in sorted({*workers, plan.num_r_workers})]
