"""Writes the report: report.json, and report.md, which has each part's rows or the reason why it has none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST_FILES, MOST_BYTES = 8, 16 << 20
"""Limits of a report that is attached to an issue."""


@dataclass(frozen=True)
class Ended:
    """The result of a part: its rows, and the reason if it did not finish."""

    letter: str
    title: str
    seconds: float
    rows: Sequence[dict[str, Any]]
    reason: str = ""

    @property
    def whole(self) -> list[dict[str, Any]]:
        """The rows; if the part did not finish or has no rows, with a row that says why."""
        if not self.reason and self.rows:
            return list(self.rows)
        reason = self.reason or "it wrote no row"
        return [*self.rows, {"name": "not finished", "value": None, "unit": "", "note": reason, "failed": True}]

    @property
    def failures(self) -> list[str]:
        """The names of rows that failed, each with its reason."""
        failed = [row for row in self.whole if row.get("failed")]
        return [f"{row['name']} ({row['note'] if row['value'] is None else row['value']})" for row in failed]


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows that a part wrote before it ended; [] if it wrote none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return found if isinstance(found, list) else []


def write(folder: Path, machine: dict[str, Any], device: str, quick: bool, parts: Sequence[Ended]) -> None:
    """Write both files. Delete pictures that would make the report too large to attach to a message."""
    data = {"machine": machine, "device": device, "quick": quick, "failed": failed(parts),
            "parts": {part.letter: {"title": part.title, "seconds": round(part.seconds, 1), "rows": part.whole}
                      for part in parts}}  # fmt: skip
    put(folder / "report.json", json.dumps(data, indent=1) + "\n")
    put(folder / "report.md", markdown(machine, device, quick, parts))
    trim(folder)


def put(file: Path, text: str) -> None:
    """Replace the file in one step, so that a killed run leaves the earlier version complete."""
    new = file.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    new.replace(file)


def why_not(folder: Path) -> str:
    """Return why no report can be written to ``folder``, for example that it has other files; "" if one can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()) and not (folder / "report.json").exists():
            return "has other files: give a new or empty folder"
        put(folder / "report.json", "{}\n")
    except OSError as error:
        return f"cannot be written to: {error.strerror}"
    return ""


def markdown(machine: dict[str, Any], device: str, quick: bool, parts: Sequence[Ended]) -> str:
    """Return report.md."""
    packages = ", ".join(f"{name} {each}" for name, each in machine["packages"].items())
    lines = [
        f"# FastDecode on {machine['gpu'] or machine['cpu']}", "",
        f"{machine['date']}, device {device}{', quick' if quick else ''}. {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory_gib']} GiB. Python {machine['python']}, {machine['system']}. {packages}.", "",
    ]  # fmt: skip
    lines += [f"**Failed:** {'; '.join(failed(parts))}" if failed(parts) else "All parts finished, as they must.", ""]
    if device == "cpu":
        lines += ["The kit was tried on a CPU: no figure here says anything of a GPU.", ""]
    for part in parts:
        lines += [f"## {part.letter}. {part.title}", "", "| what | result | |", "|---|---|---|"]
        lines += [line_of(row) for row in part.whole]
        lines += ["", f"In {part.seconds:.0f} s.", ""]
    return "\n".join(lines)


def failed(parts: Sequence[Ended]) -> list[str]:
    """Return a line for every failed row, with its part's letter."""
    return [" ".join(f"{part.letter}: {each}".split()) for part in parts for each in part.failures]


def line_of(row: dict[str, Any]) -> str:
    """Return a row of the table. A row without a value has its reason instead."""
    value = "none" if row["value"] is None else f"{row['value']} {row['unit']}".strip()
    return f"| {row['name']} | {value} | {str(row['note']).replace('|', '/')} |"


def trim(folder: Path) -> None:
    """Delete files that are too large, and the largest ones if there are too many. The report itself stays."""
    others = sorted((each for each in folder.iterdir() if each.is_file() and not each.name.startswith("report.")),
                    key=lambda file: file.stat().st_size)  # fmt: skip
    for number, file in enumerate(others):
        if number >= MOST_FILES - 2 or file.stat().st_size > MOST_BYTES:
            file.unlink()
