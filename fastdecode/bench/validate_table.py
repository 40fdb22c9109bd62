"""Predicted against measured, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fastdecode.bench.validate import ValidatedRow
from fastdecode.perfmodel.calibration import MOST_DRIFT

MILLI = 1e3
HEADER = """\
| way | R-workers | KV | heads | in flight | context | predicted ms | measured ms | error | predicted tokens/s \
| measured tokens/s | S, R: error | anchors S, R | moved | tries |
|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"""


def table_line(row: ValidatedRow, num_heads: int) -> str:
    """One row of the table."""
    each, drift = row.configuration, row.drift
    predicted, measured = row.predicted_step_seconds, row.measured_step_seconds
    s_error = row.predicted_s_seconds / row.measured_s_seconds - 1.0
    r_error = row.predicted_r_seconds / row.measured_r_seconds - 1.0
    cells = (
        each.name, each.r_workers, each.kv_dtype, f"{num_heads} / {each.num_kv_heads}", each.batch_size,
        each.context_len, f"{predicted * MILLI:.1f}", f"{measured * MILLI:.1f}", f"{row.error:+.1%}",
        f"{each.batch_size / predicted:.0f}", f"{each.batch_size / measured:.0f}", f"{s_error:+.0%}, {r_error:+.0%}",
        f"{drift.s_part:.2f}, {drift.r_part:.2f}", f"{row.moved:.1%}", row.tries,
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def error_line(rows: Sequence[ValidatedRow]) -> str:
    """Median and worst."""
    errors = np.abs([row.error for row in rows])
    worst = rows[int(np.argmax(errors))].configuration
    unsteady = sum(row.moved > MOST_DRIFT for row in rows)
    return (
        f"{len(rows)} configurations: median error {np.median(errors):.1%}, worst {errors.max():.1%} ({worst.name}, "
        f"{worst.kv_dtype}, {worst.batch_size} x {worst.context_len}); in {unsteady} the anchors moved by more than "
        f"{100 * MOST_DRIFT:g} % in every try"
    )


def row_figures(row: ValidatedRow) -> dict[str, Any]:
    """One object of ``--output-json``."""
    each = row.configuration
    names = ("name", "r_workers", "kv_dtype", "num_kv_heads", "batch_size", "context_len")
    figures = {name: value for name, value in vars(row).items() if name not in ("configuration", "drift")}
    return {
        **{name: getattr(each, name) for name in names},
        **vars(each.deployment),
        **figures,
        "error": row.error,
        "s_drift": row.drift.s_part,
        "r_drift": row.drift.r_part,
    }


def plot_rows(rows: Sequence[ValidatedRow], path: str) -> None:
    """Measured over predicted, on logarithms, with the bands of 10 % and 25 %."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 6), layout="constrained")
    seconds = np.array([(row.predicted_step_seconds, row.measured_step_seconds) for row in rows]) * MILLI
    ends = np.array([seconds.min() * 0.7, seconds.max() * 1.4])
    for part, shade in ((0.25, 0.12), (0.10, 0.22)):
        axes.fill_between(ends, ends * (1 - part), ends * (1 + part), color="tab:blue", alpha=shade, lw=0)
    axes.plot(ends, ends, color="black", lw=0.8)
    for name in dict.fromkeys(row.configuration.name for row in rows):
        mine = [row.configuration.name == name for row in rows]
        axes.scatter(*seconds[mine].T, s=24, label=name)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="predicted step, ms", ylabel="measured step, ms")
    axes.legend(title="S and R")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
