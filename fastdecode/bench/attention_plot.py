"""The picture of ``bench attention``: fraction of roofline by context, a line per query group."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

LINE_KEYS = ("isa", "kv_cache_dtype", "head_dim", "threads", "q_len", "shared_prefix_len")
"""What, with the group, makes rows a line of their own."""

NAMES = {"head_dim": "head dim {}", "threads": "{} thread(s)", "q_len": "q_len {}", "shared_prefix_len": "{} shared"}


def plot_roofline(rows: Sequence[dict[str, Any]], path: str) -> None:
    """Draw the rows as a PNG; OSError when it cannot be written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 5), layout="constrained")
    for label, points in roofline_lines(rows).items():
        contexts = sorted(points)
        axes.plot(contexts, [points[context] for context in contexts], marker="o", label=label)
    axes.axhline(1.0, color="#9a9a9a", linewidth=0.8)
    axes.set_xscale("log", base=2)
    contexts = sorted({_mean_context(row) for row in rows})
    axes.set_xticks(contexts, [f"{context:g}" for context in contexts])
    axes.set_ylim(bottom=0.0)
    axes.set_xlabel("context length, tokens")
    axes.set_ylabel("fraction of roofline")
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    figure.savefig(path, dpi=120, format="png")
    pyplot.close(figure)


def roofline_lines(rows: Sequence[dict[str, Any]]) -> dict[str, dict[float, float]]:
    """Label of each line → context length → the mean fraction; what all rows share is not in the labels."""
    varying = [key for key in LINE_KEYS if len({row[key] for row in rows}) > 1]
    found: dict[str, dict[float, list[float]]] = {}
    for row in sorted(rows, key=_group):
        label = ", ".join([f"group {_group(row)}", *(NAMES.get(key, "{}").format(row[key]) for key in varying)])
        found.setdefault(label, {}).setdefault(_mean_context(row), []).append(row["fraction_of_roofline"])
    return {
        label: {context: statistics.fmean(values) for context, values in points.items()}
        for label, points in found.items()
    }


def _group(row: dict[str, Any]) -> int:
    return row["num_heads"] // row["num_kv_heads"]


def _mean_context(row: dict[str, Any]) -> float:
    """Of a range LOW-HIGH, the middle."""
    return statistics.fmean(int(part) for part in str(row["context_len"]).split("-"))
