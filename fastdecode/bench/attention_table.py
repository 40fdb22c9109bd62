"""Rows of ``bench attention`` as text: Markdown, CSV, JSON or JSON lines."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from typing import Any

FORMATS = ("md", "csv", "json", "jsonl")

COLUMNS = (
    ("isa", "isa", "{:>6}"),
    ("kv_cache_dtype", "KV dtype", "{:>8}"),
    ("num_heads", "heads", "{:>5}"),
    ("num_kv_heads", "KV heads", "{:>8}"),
    ("head_dim", "dim", "{:>3}"),
    ("context_len", "context", "{:>9}"),
    ("batch_size", "batch", "{:>5}"),
    ("q_len", "q_len", "{:>5}"),
    ("threads", "threads", "{:>7}"),
    ("seconds_p50", "seconds", "{:>9.6f}"),
    ("kv_gb_per_s", "KV GB/s", "{:>7.2f}"),
    ("read_peak_gb_per_s", "read peak", "{:>9.2f}"),
    ("scattered_read_gb_per_s", "scattered", "{:>9.2f}"),
    ("mac_peak_g_per_s", "MAC peak", "{:>8.1f}"),
    ("fraction_of_scattered", "of scattered", "{:>12.3f}"),
    ("fraction_of_roofline", "of roofline", "{:>11.3f}"),
    ("max_relative_error", "max error", "{:>9.1e}"),
)
"""Key, heading and format of the Markdown table."""


class RowPrinter:
    """Hands text to ``write`` line by line: a row as soon as it is measured, JSON's one array at the end."""

    def __init__(self, output_format: str, write: Callable[[str], None]) -> None:
        self.output_format, self._write = output_format, write
        self._rows: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any]) -> None:
        """One more row, after the heading where it is the first."""
        if not self._rows:
            for line in self._heading(row):
                self._write(line)
        self._rows.append(row)
        if self.output_format == "md":
            self._write(_table_line([form.format(row[key]) for key, _, form in COLUMNS]))
        elif self.output_format == "csv":
            self._write(_csv_line(list(row.values())))
        elif self.output_format == "jsonl":
            self._write(json.dumps(row, allow_nan=False))

    def close(self) -> None:
        """What comes after the last row."""
        if self.output_format == "json":
            self._write(to_json(self._rows))

    def _heading(self, row: dict[str, Any]) -> list[str]:
        if self.output_format == "md":
            widths = [len(form.format(0)) for _, _, form in COLUMNS]
            titles = [title.rjust(width) for (_, title, _), width in zip(COLUMNS, widths, strict=True)]
            return [_table_line(titles), _table_line(["-" * (len(title) - 1) + ":" for title in titles])]
        return [_csv_line(list(row))] if self.output_format == "csv" else []


def to_json(rows: Sequence[dict[str, Any]]) -> str:
    """A JSON array of rows."""
    return json.dumps(list(rows), indent=2, allow_nan=False)


def _table_line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _csv_line(cells: list[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(cells)
    return text.getvalue()
