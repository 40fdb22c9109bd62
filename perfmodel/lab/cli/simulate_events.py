"""Worker events in ``fastdecode simulate``: their flags and effects."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fastdecode.core.errors import ConfigError
from fastdecode.perfmodel.lab.simulate import Simulator, Timeline, WorkerEvent, random_losses, read_events

RESTART_SECONDS = 60.0


def add_event_flags(group: Any) -> None:
    """Add flags for events from a file, or at random."""
    group.add_argument(
        "--events", metavar="FILE",
        help='file of events, JSON lines such as {"seconds": 12.5, "event": "lose", "r_worker": 3}; '
            "events are lose, join, drain, and slow with a factor; prefill_worker may replace "
            "r_worker",
    )  # fmt: skip
    group.add_argument(
        "--mtbf", type=float, metavar="HOURS",
        help="mean time between failures, after which each R-worker is lost at random",
    )  # fmt: skip
    group.add_argument(
        "--restart-seconds", type=float, metavar="SECONDS",
        help=f"with --mtbf: time until a lost R-worker joins again; inf: never ({RESTART_SECONDS:g})",
    )  # fmt: skip
    group.add_argument(
        "--num-copies", type=int, choices=(1, 2), dest="kv_replicas", default=argparse.SUPPRESS,
        help="the same as --kv-replicas",
    )  # fmt: skip


def read_timeline(args: argparse.Namespace, num_r_workers: int) -> Callable[[], Timeline] | None:
    """Return a function that makes the events of a run, the same each time; None without events.

    A ConfigError names the bad flag, or the bad line of the file.
    """
    if args.mtbf is None and args.restart_seconds is not None:
        raise ConfigError("restart_seconds is for R-workers that are lost at random: give --mtbf as well")
    if args.mtbf is not None and not 0 < args.mtbf < math.inf:
        raise ConfigError(f"mtbf must be above 0 hours and finite, not {args.mtbf!r}")
    restart = RESTART_SECONDS if args.restart_seconds is None else args.restart_seconds
    if not restart >= 0:
        raise ConfigError(f"restart_seconds must be at least 0, not {restart!r}")
    listed = _listed(args, num_r_workers) if args.events else []
    if args.mtbf is None:
        return (lambda: Timeline(listed)) if listed else None
    return lambda: Timeline(listed, random_losses(num_r_workers, args.mtbf, restart, args.seed))


def _listed(args: argparse.Namespace, num_r_workers: int) -> list[WorkerEvent]:
    path = Path(args.events)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read events {path}: {error}") from None
    return read_events(text, str(path), num_r_workers, args.num_prefill_workers or 0)


def event_report(simulator: Simulator) -> dict[str, Any] | None:
    """Return the events of a run and their cost; None if the run was started without events."""
    if simulator.interruptions is None:
        return None
    world, pauses = simulator.world, simulator.interruptions.pauses()
    found = {f"p{percent}": float(np.percentile(pauses, percent)) if len(pauses) else 0.0 for percent in (50, 99)}
    return {
        "lost": world.happened["lose"],
        "joined": world.happened["join"],
        "drained": world.happened["drain"],
        "slowed": world.happened["slow"],
        "ignored": world.num_ignored,
        "recomputed_tokens": simulator.interruptions.num_recomputed,
        "num_pauses": len(pauses),
        "pause_seconds": {**found, "max": float(pauses.max(initial=0.0))},
        "given_up_requests": simulator.requests.num_given_up,
    }


def compared(events: dict[str, Any], report: dict[str, Any], without: dict[str, Any]) -> dict[str, Any]:
    """Return ``events`` with the rates of two runs: ``report`` with events, ``without`` without them."""
    names = ("output_tokens_per_second", "tokens_per_second", "elapsed_time")
    rates = {name: report[name] for name in names} | {f"{name}_without": without[name] for name in names}
    whole = without[names[0]]
    return {**events, **rates, "kept_share": report[names[0]] / whole if whole else 1.0}


def event_lines(events: dict[str, Any]) -> Iterator[str]:
    """Yield the report as text lines."""
    ignored = f"; {events['ignored']} ignored, of workers that were not there then" if events["ignored"] else ""
    yield f"Events: {', '.join(f'{events[name]} {name}' for name in ('lost', 'joined', 'drained', 'slowed'))}{ignored}"
    pauses = events["pause_seconds"]
    yield (
        f"Tokens computed again: {events['recomputed_tokens']}; {events['num_pauses']} pauses of sequences that lost "
        f"something: median {pauses['p50']:.3g} s, p99 {pauses['p99']:.3g} s, longest {pauses['max']:.3g} s"
    )
    if events["given_up_requests"]:
        yield f"Given up, since no R-worker that was left had room: {events['given_up_requests']} requests"
    if "kept_share" in events:  # only if a second run without events finished too
        yield (
            f"Output tokens/s: {events['output_tokens_per_second']:.2f} with the events, "
            f"{events['output_tokens_per_second_without']:.2f} without ({events['kept_share']:.3f})"
        )
