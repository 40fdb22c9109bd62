"""Draws a plan: time per token and price over the number of concurrent users, for FastDecode and the GPU alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fastdecode.perfmodel.lab.gpu_only import GpuServer
from fastdecode.perfmodel.lab.measure.plots import picture
from fastdecode.perfmodel.lab.planner import Planner
from fastdecode.perfmodel.service import ServiceLimits
from fastdecode.perfmodel.sizing import Plan, Prices

MOST_POINTS = 24


@dataclass(frozen=True)
class Point:
    """A point of the picture: ``milliseconds`` per token with ``users`` users. ``fits``: memory suffices for them."""

    users: int
    milliseconds: float
    price: float | None
    fits: bool


def plan_points(planner: Planner, plan: Plan, prices: Prices) -> list[Point]:
    """Return points of the plan's R-workers, from few users to four times the plan's."""
    fixed = replace(planner, num_r_workers=plan.num_r_workers)
    sizes = np.unique(np.geomspace(1, 4 * plan.mini_batch_size, MOST_POINTS).round().astype(int)).tolist()
    points = []
    for size in sorted({*sizes, plan.mini_batch_size}):
        found = fixed.candidate(size, plan.num_r_workers)
        price = prices.per_million_tokens(plan.num_hosts, found.output_tokens_per_second)
        points.append(Point(size * plan.num_mini_batches, found.step_seconds * 1e3, price, found.fits_memory))
    return points


def alone_points(server: GpuServer, most_users: int, prices: Prices) -> list[Point]:
    """Return the plot's points for the GPU alone, up to twice as many users as its memory holds."""
    most = min(max(2 * server.most_sequences, 2), max(most_users, 2))
    sizes = np.unique(np.geomspace(1, most, MOST_POINTS).round().astype(int)).tolist()
    points = []
    for size in sorted({*sizes, *([server.most_sequences] if 0 < server.most_sequences <= most else [])}):
        seconds = server.step_seconds(size)
        fits = size <= server.most_sequences
        points.append(Point(size, seconds * 1e3, prices.per_million_tokens(0, size / seconds), fits))
    return points


def plot_plan(
    planner: Planner, plan: Plan, server: GpuServer | None, prices: Prices, limits: ServiceLimits, title: str, path: str
) -> None:
    """Draw FastDecode and the GPU alone; hollow points exceed memory. Raise OSError if ``path`` cannot be written."""
    from matplotlib.ticker import LogFormatter

    own = plan_points(planner, plan, prices)
    other = alone_points(server, own[-1].users, prices) if server else []
    fastdecode, alone, limit = "#2f6db3", "#b5542f", "#9a9a9a"
    ways = [("FastDecode", fastdecode, own), ("GPU alone", alone, other)]
    priced = any(point.price is not None for point in own)
    panels = 2 if priced else 1
    with picture(path, 1, panels, figsize=(6.2 * panels, 4.6), squeeze=False) as axes:
        times = axes[0][0]
        for name, colour, points in ways:
            _draw_points(times, points, [point.milliseconds for point in points], name, colour)
        times.plot(
            plan.in_flight, plan.step_seconds * 1e3, "*", markersize=15, color=fastdecode, zorder=5, label="the plan"
        )
        if limits.tpot_seconds < np.inf:
            times.axhline(limits.tpot_seconds * 1e3, color=limit, linestyle="--", linewidth=0.9, label="limit (--tpot)")
        ranks = f"{plan.num_r_workers} R-workers of each of {plan.tensor_parallel_size} ranks"
        workers = ranks if plan.tensor_parallel_size > 1 else f"{plan.num_r_workers} R-worker(s)"
        times.set(xscale="log", yscale="log", xlabel=f"users at once ({workers})", ylabel="ms per token of each user")
        if priced:
            _draw_prices(axes[0][1], ways)
        for axis in axes[0]:
            axis.xaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.5)))
        times.figure.suptitle(f"{title}\nhollow: memory has no room for so many", fontsize=10)
        times.figure.legend(loc="outside lower center", ncols=4, frameon=False)


def _draw_points(axes: Any, points: Sequence[Point], values: Sequence[float | None], name: str, colour: str) -> None:
    known = [(point, value) for point, value in zip(points, values, strict=True) if value is not None]
    if not known:
        return
    users, heights = [point.users for point, _ in known], [value for _, value in known]
    faces = [colour if point.fits else "white" for point, _ in known]
    axes.plot(users, heights, color=colour, linewidth=1.0, label=name)
    axes.scatter(users, heights, s=22, facecolors=faces, edgecolors=colour, zorder=3)


def _draw_prices(axes: Any, ways: Sequence[tuple[str, str, Sequence[Point]]]) -> None:
    for _, colour, points in ways:
        _draw_points(axes, points, [point.price for point in points], "_nolegend_", colour)
    axes.set(xscale="log", yscale="log", xlabel="users at once", ylabel="price of a million output tokens")
