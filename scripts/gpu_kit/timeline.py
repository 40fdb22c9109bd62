"""Draws what S-worker and R-workers did in decode steps, as SVG, which needs no package."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

WIDTH, BAR, GAP = 900, 18, 8
COLOURS = {"S, model": "#3b6fb6", "S, waits": "#d9d9d9", "S, host": "#e0a030", "R, busy": "#4f9d69"}


def draw(file: Path, steps: Sequence[Any]) -> None:
    """Draw a pair of bars per step: the S-worker's time by state, and the busiest R-worker's time."""
    longest = max(step.wall_seconds for step in steps)
    lines, y = [], 40
    for number, step in enumerate(steps):
        scale = (WIDTH - 120) / longest
        states = (("S, model", step.s_seconds), ("S, waits", step.wait_seconds), ("S, host", step.host_seconds))
        x = 100.0
        for name, seconds in states:
            lines.append(bar(x, y, seconds * scale, name))
            x += seconds * scale
        lines.append(bar(100.0, y + BAR, max(step.r_seconds) * scale, "R, busy"))
        lines.append(f'<text x="8" y="{y + BAR + 4}">step {number}, {step.wall_seconds * 1e3:.1f} ms</text>')
        y += 2 * BAR + GAP
    keys = [key(100 + 150 * place, name) for place, name in enumerate(COLOURS)]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" font-family="sans-serif"'
    head += ' font-size="11">'
    file.write_text("\n".join([head, *keys, *lines, "</svg>\n"]), encoding="utf-8")


def bar(x: float, y: float, width: float, name: str) -> str:
    return f'<rect x="{x:.1f}" y="{y}" width="{max(width, 0.3):.1f}" height="{BAR - 2}" fill="{COLOURS[name]}"/>'


def key(x: int, name: str) -> str:
    """Return an entry of the legend: a colour and its name."""
    return (
        f'<rect x="{x}" y="10" width="14" height="14" fill="{COLOURS[name]}"/><text x="{x + 20}" y="22">{name}</text>'
    )
