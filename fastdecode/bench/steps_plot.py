"""The picture of ``bench throughput --plot-steps``: KV load and seconds of every step."""

from __future__ import annotations

from collections.abc import Sequence

from fastdecode.metrics import StepRecord


def plot_steps(steps: Sequence[StepRecord], kv_load_limit: int | None, path: str) -> None:
    """Draw the steps of a run as a PNG; OSError when it cannot be written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (load, seconds) = pyplot.subplots(2, 1, figsize=(10, 6), sharex=True, layout="constrained")
    load.plot([step.kv_load for step in steps], color="#3b6ea5")
    load.set_ylabel("KV tokens attended")
    load.set_ylim(bottom=0)
    if kv_load_limit and kv_load_limit < 2 * max(step.kv_load for step in steps):
        load.axhline(kv_load_limit, color="#9a9a9a", linewidth=0.8, linestyle="--")
    for label, color, values in (
        ("step", "#555555", [step.wall_seconds for step in steps]),
        ("S-worker", "#d98c3f", [step.s_seconds for step in steps]),
        ("mean R-worker", "#9db8d2", [sum(step.r_seconds) / len(step.r_seconds) for step in steps]),
        ("busiest R-worker", "#3b6ea5", [max(step.r_seconds) for step in steps]),
    ):
        seconds.plot([value * 1e3 for value in values], color=color, linewidth=0.9, label=label)
    decode_only = [step.wall_seconds * 1e3 for step in steps if step.is_decode]
    if decode_only:
        seconds.set_ylim(0, 2 * max(sorted(decode_only)[: max(1, len(decode_only) * 99 // 100)]))
    seconds.set_ylabel("milliseconds")
    seconds.set_xlabel("step")
    seconds.legend(loc="upper left", frameon=False, fontsize=8)
    figure.savefig(path, dpi=120, format="png")
    pyplot.close(figure)
