"""Rounds whose R-workers park prefixes: an earlier engine leaves the requests' prefixes on disks for the round's."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fastdecode.engine.engine import LLMEngine

PARKS = ("plain", "prefill", "ranks")
"""Kinds of rounds whose R-workers have disks."""


def draw_parking(seed: int, kind: str, settings: dict[str, Any], has_states: bool) -> dict[str, Any]:
    """Return settings that park at once, or none; a generator of its own leaves other rounds as they were.

    Models with states are few, so that their rounds park more often.
    """
    share = 1 / 2 if has_states else 1 / 4
    parks = kind in PARKS and settings.get("state_on") != "s" and random.Random(f"parking {seed}").random() < share
    return {"park_dir": "parked", "park_after": 0.0, "enable_prefix_caching": True} if parks else {}


def place_disks(settings: dict[str, Any], folder: Path, cleanup: ExitStack) -> Path | None:
    """Put the round's disks into ``folder`` until ``cleanup``; return their place; None for a round without."""
    if "park_dir" not in settings:
        return None
    place = folder / settings["park_dir"]
    shutil.rmtree(place, ignore_errors=True)
    cleanup.callback(shutil.rmtree, place, ignore_errors=True)
    settings["park_dir"] = str(place)
    return place


def disk_flags(place: Path | None, number: int) -> tuple[str, ...]:
    """Return the flags of R-worker ``number`` that listens, with a disk in ``place``; none for a round without."""
    return ("--park-dir", str(place / str(number)), "--park-after", "0") if place else ()


def leave_prefixes(begin: Callable[[], LLMEngine], add: Callable[[LLMEngine], None]) -> None:
    """Let an engine answer the requests that ``add`` gives it; it parks their prefixes as it ends."""
    engine = begin()
    try:
        add(engine)
        while engine.has_unfinished_requests():
            engine.step()
    finally:
        engine.close()
