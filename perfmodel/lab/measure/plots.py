"""Draws the pictures that commands save.

The pictures show a step's timeline, a run's steps, the roofline, a validation, and times to first token.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from fastdecode.core.errors import naming
from fastdecode.core.metrics import HOST, MODEL, R_BUSY, WAIT, Event, StepRecord, lane_name, mini_batch_name

if TYPE_CHECKING:  # these import torch, which drawing a plan does not need
    from fastdecode.perfmodel.lab.measure.prefill_bench import PrefillRow
    from fastdecode.perfmodel.lab.measure.validation import ValidatedRow

COLOURS = ("#2f6db3", "#e08a2e", "#4c9f70", "#a05195")
STATE_COLOURS = {WAIT: "#eeeeee", HOST: "#9a9a9a"}
SHOWN_LAYERS = 8


@contextmanager
def picture(path: str, *grid: int, **options: Any) -> Iterator[Any]:
    """Yield the axes of a figure, and save it at ``path`` in the format of its suffix.

    Raise OSError if ``path`` cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(*grid, layout="constrained", **options)
    try:
        yield axes
        with naming(path):
            figure.savefig(path, dpi=120)
    finally:
        pyplot.close(figure)


def typical_decode_step(steps: Sequence[Sequence[Event]], records: Sequence[StepRecord]) -> Sequence[Event]:
    """Return the decode step of median duration among those with overlapping mini-batches, else among all steps.

    The first step is excluded."""
    typical = [step for step, record in zip(steps, records, strict=True) if record.is_decode and record.overlapped]
    decode = typical[1:] or list(steps)
    median = statistics.median_low([_end(step) - _start(step) for step in decode])
    return next(step for step in decode if _end(step) - _start(step) == median)


def plot_timeline(events: Sequence[Event], path: str) -> None:
    """Draw one step, up to the end of its first ``SHOWN_LAYERS`` layers.

    Raise OSError if the file cannot be written.
    """

    num_layers = 1 + max(event.interval.layer for event in events if event.interval.state == R_BUSY)
    shown = _first_layers(events) if num_layers > SHOWN_LAYERS else events
    layers = f"the first {SHOWN_LAYERS} of {num_layers}" if num_layers > SHOWN_LAYERS else f"all {num_layers}"
    start = _start(shown)
    lanes = sorted({event.lane for event in shown})
    with picture(path, figsize=(12, 1.2 + 0.7 * len(lanes))) as axes:
        for event in shown:
            _draw(axes, event, lanes.index(event.lane), start, (_end(shown) - start) * 1e3)
        axes.set_yticks(range(len(lanes)), [lane_name(lane) for lane in lanes])
        axes.invert_yaxis()
        axes.set_xlabel("ms")
        axes.set_title(f"One decode step, {layers} layers: each worker's mini-batch", fontsize=11)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.legend(handles=_legend(shown), loc="upper center", bbox_to_anchor=(0.5, -0.25), ncol=6, frameon=False)


def _first_layers(events: Sequence[Event]) -> list[Event]:
    """Return the events of the first ``SHOWN_LAYERS`` layers, and the waiting and host work before their end."""
    end = max(event.interval.end_seconds for event in events if 0 <= event.interval.layer < SHOWN_LAYERS)
    return [event for event in events if event.interval.layer < SHOWN_LAYERS and event.interval.start_seconds < end]


def _draw(axes: Any, event: Event, row: int, start: float, shown_milliseconds: float) -> None:
    """Draw a bar, and its label if it fits."""
    interval = event.interval
    left, width = (interval.start_seconds - start) * 1e3, (interval.end_seconds - interval.start_seconds) * 1e3
    axes.barh(row, width, left=left, height=0.7, color=_colour(event), edgecolor="white", linewidth=0.4)
    # Least width of a bar with a label, as a fraction of the picture's
    label_share = 0.018
    wide = width >= label_share * shown_milliseconds
    if wide and interval.state in (MODEL, R_BUSY) and interval.mini_batch >= 0 and interval.layer >= 0:
        label = f"{mini_batch_name(interval.mini_batch)}{interval.layer}"
        axes.text(left + width / 2, row, label, ha="center", va="center", color="white", fontsize=7)


def _colour(event: Event) -> str:
    interval = event.interval
    if interval.state in STATE_COLOURS or interval.mini_batch < 0:
        return STATE_COLOURS.get(interval.state, STATE_COLOURS[HOST])
    return COLOURS[interval.mini_batch % len(COLOURS)]


def _legend(events: Sequence[Event]) -> list[Any]:
    from matplotlib.patches import Patch

    mini_batches = sorted({event.interval.mini_batch for event in events if event.interval.mini_batch >= 0})
    named = [Patch(color=COLOURS[i % len(COLOURS)], label=f"mini-batch {mini_batch_name(i)}") for i in mini_batches]
    return [*named, Patch(color=STATE_COLOURS[WAIT], label="waiting"), Patch(color=STATE_COLOURS[HOST], label="host")]


def _start(events: Sequence[Event]) -> float:
    return min(event.interval.start_seconds for event in events if event.interval.state != HOST)


def _end(events: Sequence[Event]) -> float:
    return max(event.interval.end_seconds for event in events if event.interval.state != HOST)


def plot_steps(steps: Sequence[StepRecord], kv_load_limit: int | None, path: str) -> None:
    """Draw the time and load of each step of a run to ``path``. Raise OSError if the file cannot be written."""
    with picture(path, 2, 1, figsize=(10, 6.4), sharex=True) as (load, seconds):
        load.figure.suptitle("KV load and time of every step", fontsize=11)
        load.plot([step.kv_load for step in steps], color="#3b6ea5", label="KV load")
        load.set_ylabel("KV tokens attended")
        load.set_ylim(bottom=0)
        if kv_load_limit and kv_load_limit < 2 * max(step.kv_load for step in steps):
            load.axhline(kv_load_limit, color="#9a9a9a", linewidth=0.8, linestyle="--", label="its limit")
        for label, color, values in (
            ("step", "#555555", [step.wall_seconds for step in steps]),
            ("S-worker", "#d98c3f", [step.s_seconds for step in steps]),
            ("mean R-worker", "#9db8d2", [sum(step.r_seconds) / len(step.r_seconds) for step in steps]),
            ("busiest R-worker", "#3b6ea5", [max(step.r_seconds) for step in steps]),
        ):
            seconds.plot([value * 1e3 for value in values], color=color, linewidth=0.9, label=label)
        seconds.set_ylim(0, 1.05 * max(step.wall_seconds for step in steps) * 1e3)  # the longest steps have prompts
        seconds.set_ylabel("milliseconds")
        seconds.set_xlabel("step")
        load.figure.legend(loc="outside lower center", ncols=6, frameon=False, fontsize=8)


def plot_roofline(rows: Sequence[dict[str, Any]], path: str) -> None:
    """Draw the fraction of the roofline that each row of ``bench attention`` reaches. Raise OSError on failure."""
    with picture(path, figsize=(10, 5)) as axes:
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
        axes.figure.legend(loc="outside right upper", frameon=False, fontsize=8)


def roofline_lines(rows: Sequence[dict[str, Any]]) -> dict[str, dict[float, float]]:
    """Return mean fractions of the roofline by line label and context length. Labels name only sizes that vary."""
    # Rows that differ in one of these keys, or in query heads per KV head, belong to different lines
    line_keys = ("isa", "kv_cache_dtype", "head_dim", "threads", "q_len", "shared_prefix_len")
    varying = [key for key in line_keys if len({row[key] for row in rows}) > 1]
    found: dict[str, dict[float, list[float]]] = {}
    names = {
        "head_dim": "head dim {}",
        "threads": "{} thread(s)",
        "q_len": "q_len {}",
        "shared_prefix_len": "{} shared",
    }
    for row in sorted(rows, key=_group):
        label = ", ".join([f"group {_group(row)}", *(names.get(key, "{}").format(row[key]) for key in varying)])
        found.setdefault(label, {}).setdefault(_mean_context(row), []).append(row["fraction_of_roofline"])
    return {
        label: {context: statistics.fmean(values) for context, values in points.items()}
        for label, points in found.items()
    }


def _group(row: dict[str, Any]) -> int:
    return row["num_heads"] // row["num_kv_heads"]


def _mean_context(row: dict[str, Any]) -> float:
    """Return the context length of a row; for a range LOW-HIGH, its middle."""
    return statistics.fmean(int(part) for part in str(row["context_len"]).split("-"))


def plot_validation(rows: Sequence[ValidatedRow], path: str) -> None:
    """Draw measured against predicted seconds on logarithmic axes, with bands of 10 % and 25 %.

    Raise OSError if the file cannot be written.
    """
    with picture(path, figsize=(6, 6)) as axes:
        seconds = np.array([(row.predicted_step_seconds, row.measured_step_seconds) for row in rows]) * 1e3
        ends = np.array([seconds.min() * 0.7, seconds.max() * 1.4])
        for part, shade in ((0.25, 0.12), (0.10, 0.22)):
            band = f"within {part:.0%}"
            axes.fill_between(
                ends, ends * (1 - part), ends * (1 + part), color="tab:blue", alpha=shade, lw=0, label=band
            )
        axes.plot(ends, ends, color="black", lw=0.8, label="as predicted")
        for name in dict.fromkeys(row.configuration.name for row in rows):
            mine = [row.configuration.name == name for row in rows]
            axes.scatter(*seconds[mine].T, s=24, label=name)
        axes.set(
            xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="predicted step, ms", ylabel="measured step, ms"
        )
        for axis in (axes.xaxis, axes.yaxis):
            axis.get_major_locator().set_params(subs=(1, 2, 5))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter("")
        axes.legend(title="bands; cores of S and R", fontsize=8)


def plot_prefill(rows: Sequence[PrefillRow], path: str) -> None:
    """Draw measured and predicted (dashed) times to first token over the context, per method and number of workers.

    Raise OSError if the file cannot be written.
    """
    with picture(path, figsize=(8, 5)) as axes:
        for index, key in enumerate(dict.fromkeys((row.num_workers, row.method) for row in rows)):
            own = [row for row in rows if (row.num_workers, row.method) == key]
            lengths, colour = [row.prefill_len for row in own], f"C{index}"
            label = f"{key[1]}, {key[0]} workers" if key[0] > 1 else "1 worker"
            axes.plot(lengths, [row.ttft_seconds_p50 for row in own], "o-", color=colour, label=label)
            axes.plot(lengths, [row.predicted_ttft_seconds for row in own], "--", color=colour, linewidth=0.8)
        axes.set(xlabel="prompt tokens", ylabel="seconds to the first token", xlim=(0, None), ylim=(0, None))
        axes.legend(title="measured; predicted dashed", frameon=False)
