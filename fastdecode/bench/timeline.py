"""The picture of a decode step: an S lane, a lane per R-worker, and the mini-batches in their colours."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from fastdecode.clock import HOST, MODEL, WAIT
from fastdecode.trace import R_BUSY, Event, lane_name, mini_batch_name

COLOURS = ("#2f6db3", "#e08a2e", "#4c9f70", "#a05195")
STATE_COLOURS = {WAIT: "#eeeeee", HOST: "#9a9a9a"}
SHOWN_LAYERS = 8


def typical_decode_step(steps: Sequence[Sequence[Event]], is_decode: Sequence[bool]) -> Sequence[Event]:
    """The decode step (after the first) whose duration is the median one; any step when there is none."""
    decode = [step for step, decodes in zip(steps, is_decode, strict=True) if decodes][1:] or list(steps)
    median = statistics.median_low([_end(step) - _start(step) for step in decode])
    return next(step for step in decode if _end(step) - _start(step) == median)


def plot_timeline(events: Sequence[Event], path: str) -> None:
    """Draw the first layers of one step as a PNG; OSError when it cannot be written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [event for event in events if event.span.layer < SHOWN_LAYERS]
    start = _start(shown)
    lanes = sorted({event.lane for event in shown})
    figure, axes = pyplot.subplots(figsize=(12, 1.2 + 0.7 * len(lanes)), layout="constrained")
    for event in shown:
        _draw(axes, event, lanes.index(event.lane), start)
    axes.set_yticks(range(len(lanes)), [lane_name(lane) for lane in lanes])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_title(f"One decode step, first {SHOWN_LAYERS} layers: who works on which mini-batch", fontsize=11)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(handles=_legend(shown), loc="upper center", bbox_to_anchor=(0.5, -0.25), ncol=6, frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw(axes: Any, event: Event, row: int, start: float) -> None:
    span = event.span
    left, width = (span.start_seconds - start) * 1e3, (span.end_seconds - span.start_seconds) * 1e3
    axes.barh(row, width, left=left, height=0.7, color=_colour(event), edgecolor="white", linewidth=0.4)
    if span.state in (MODEL, R_BUSY) and span.mini_batch >= 0 and span.layer >= 0:
        label = f"{mini_batch_name(span.mini_batch)}{span.layer}"
        axes.text(left + width / 2, row, label, ha="center", va="center", color="white", fontsize=7, clip_on=True)


def _colour(event: Event) -> str:
    span = event.span
    if span.state in STATE_COLOURS or span.mini_batch < 0:
        return STATE_COLOURS.get(span.state, STATE_COLOURS[HOST])
    return COLOURS[span.mini_batch % len(COLOURS)]


def _legend(events: Sequence[Event]) -> list[Any]:
    from matplotlib.patches import Patch

    mini_batches = sorted({event.span.mini_batch for event in events if event.span.mini_batch >= 0})
    named = [Patch(color=COLOURS[i % len(COLOURS)], label=f"mini-batch {mini_batch_name(i)}") for i in mini_batches]
    return [*named, Patch(color=STATE_COLOURS[WAIT], label="waiting"), Patch(color=STATE_COLOURS[HOST], label="host")]


def _start(events: Sequence[Event]) -> float:
    return min(event.span.start_seconds for event in events if event.span.state != HOST)


def _end(events: Sequence[Event]) -> float:
    return max(event.span.end_seconds for event in events if event.span.state != HOST)
