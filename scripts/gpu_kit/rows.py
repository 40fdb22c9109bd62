"""Rows of the report. A part writes each row at once, so that a part that is stopped keeps its rows."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Row:
    """One row of the report. ``value``: None if ``note`` says why there is none. ``failed``: the value is wrong."""

    name: str
    value: float | str | None
    unit: str = ""
    note: str = ""
    failed: bool = False


class Part:
    """The settings of a part, and the file to which it writes its rows."""

    def __init__(self, file: Path, device: str, quick: bool) -> None:
        self.device, self.quick = device, quick
        self.folder = file.parent
        self._file = file
        self._rows: list[Row] = []

    def add(self, name: str, value: float | str | None, unit: str = "", note: str = "", must_be: object = None) -> None:
        """Add a row, and write all rows. ``must_be``: the only right value; the row failed if ``value`` differs."""
        self._rows.append(Row(name, value, unit, note, must_be is not None and value != must_be))
        self._file.write_text(json.dumps([asdict(row) for row in self._rows], indent=1))
        print(f"  {name}: {'-' if value is None else value} {unit} {note}".rstrip(), flush=True)

    def tried(self, name: str, work: Any) -> Any:
        """Return the result of ``work()``. If it raises an error, add a failed row with the reason and return None."""
        try:
            return work()
        except Exception as error:
            self.add(name, None, note=reason_of(error), must_be="a figure")
            return None

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"


def reason_of(error: BaseException) -> str:
    """Return an error's kind and its first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def part_of_arguments() -> Part:
    """Return the part that this process runs, from its command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    return Part(args.rows, args.device, args.quick)
