"""Measures R-worker attention relative to the machine's peaks.

Calls and peaks are measured in turns, since the speed of a shared machine drifts."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastdecode import _rworker
from fastdecode.core.machine import usable_cores
from fastdecode.core.types import READ_AHEAD
from fastdecode.perfmodel.lab.measure.attention_cache import FilledCache, check_memory
from fastdecode.perfmodel.lab.measure.attention_shape import AttentionShape


class AttentionBench:
    """Measures attention calls of an R-worker, one row of figures per shape.

    ``cache_bytes``: bytes that are read to find the peak read rate, well above the last-level cache; also of keys and
    values if no batch size is given. ``repeats``: calls per shape.
    """

    def __init__(self, cache_bytes: int, repeats: int, seed: int) -> None:
        self.cache_bytes, self.repeats, self.seed = cache_bytes, repeats, seed
        self._peaks: _rworker.Peaks | None = None
        self._peaks_of: tuple[int, str] | None = None

    def check(self, shape: AttentionShape) -> None:
        """Raise CapacityError if memory is too small for caches of ``shape`` and, if any, ``shape.beside``."""
        caches = [(each, each.lengths(self.cache_bytes, self.seed)) for each in (shape, shape.beside) if each]
        check_memory(caches, self.cache_bytes)

    def measure(self, shape: AttentionShape) -> dict[str, Any]:
        """Return one row with the keys of ``bench attention``'s JSON, after one warm-up call.

        If ``shape`` has another dtype, a bfloat16 cache is measured in turn with it. Both have the given batch size, or
        else the same number of bytes.
        """
        peaks = self._peaks_for(shape)
        with ExitStack() as caches:
            cache = caches.enter_context(closing(self._fill(shape)))
            beside = caches.enter_context(closing(self._fill(shape.beside))) if shape.beside else cache
            samples = Samples(peaks, cache, beside, self.repeats)
            return _row(cache, beside, samples, cache.commit_and_check())

    def _fill(self, shape: AttentionShape) -> FilledCache:
        cache = FilledCache(shape, shape.lengths(self.cache_bytes, self.seed), self.seed)
        cache.call()
        return cache

    def _peaks_for(self, shape: AttentionShape) -> _rworker.Peaks:
        """Return an object that measures peaks with the isa and threads of ``shape``; keep only the latest."""
        if self._peaks is None or self._peaks_of != (shape.threads, shape.isa):
            self._peaks = None
            cores = usable_cores()[: shape.threads]
            self._peaks = _rworker.Peaks(
                num_threads=shape.threads, num_bytes=self.cache_bytes, cores=cores, isa=shape.isa
            )
            self._peaks_of = (shape.threads, shape.isa)
        return self._peaks


class Samples:
    """Rates of reads, scattered reads and multiply-adds, and times of attention with ``cache`` and a bfloat16 cache.

    They are sampled in turn, ``repeats`` times; reads once more at the end. ``beside``: the bfloat16 cache, perhaps
    ``cache``.
    """

    def __init__(self, peaks: _rworker.Peaks, cache: FilledCache, beside: FilledCache, repeats: int) -> None:
        shape = cache.shape

        def reads() -> tuple[float, float]:
            ways = (None, *READ_AHEAD)
            scattered = (peaks.read_scattered(piece_bytes=shape.piece_bytes, read_ahead=each) for each in ways)
            return peaks.read(), max(scattered)

        rounds = []
        for _ in range(repeats):
            own = (*reads(), peaks.multiply_add(kv_dtype=shape.arithmetic_dtype), *cache.call())
            rounds.append((*own, own[-1] if beside is cache else beside.call()[1]))
        columns = np.array(rounds).T
        self.read, self.scattered, self.mac, self.plan_seconds, self.seconds, self.beside_seconds = columns
        read, scattered = reads()
        self.read, self.scattered = np.append(self.read, read), np.append(self.scattered, scattered)


def _row(cache: FilledCache, beside: FilledCache, samples: Samples, error: float) -> dict[str, Any]:
    shape, lengths = cache.shape, cache.lengths
    num_tokens, kv_bytes = int(lengths.sum()), shape.tokens_needed(lengths) * shape.layout.kv_bytes_per_token
    multiply_adds = num_tokens * shape.multiply_adds_per_token * shape.q_len
    seconds = float(np.median(samples.seconds))
    read_peak, mac_peak = float(np.median(samples.read)), float(np.median(samples.mac))
    scattered = float(np.median(samples.scattered))
    roofline = Roofline(kv_bytes, multiply_adds, scattered, mac_peak)
    rate = kv_bytes / seconds / 1e9
    tokens_per_second = num_tokens / samples.seconds
    beside_per_second = int(beside.lengths.sum()) / samples.beside_seconds
    return {
        "isa": cache.worker.isa,
        "kv_cache_dtype": shape.kv_cache_dtype,
        "num_heads": shape.num_heads,
        "num_kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "context_len": shape.context_len.label,
        "batch_size": len(lengths),
        "q_len": shape.q_len,
        "threads": shape.threads,
        "seconds_p50": seconds,
        "kv_gb_per_s": rate,
        "read_peak_gb_per_s": read_peak,
        "scattered_read_gb_per_s": scattered,
        "mac_peak_g_per_s": mac_peak,
        "fraction_of_read_peak": rate / read_peak,
        "fraction_of_scattered": rate / scattered,
        "fraction_of_roofline": rate / roofline.gb_per_s,
        "max_relative_error": error,
        "shared_prefix_len": shape.shared_prefix_len,
        "latent_dim": shape.latent_dim,
        "index_picks": shape.index_picks,
        "model_dtype": shape.model_dtype,
        "kv_bytes": kv_bytes,
        "roofline_gb_per_s": roofline.gb_per_s,
        "arithmetic_gb_per_s": roofline.arithmetic_gb_per_s,
        "limit": roofline.limit,
        "cached_tokens_per_second": num_tokens / seconds,
        "tokens_over_bfloat16": float(np.median(tokens_per_second / beside_per_second)),
        "seconds_p10": float(np.quantile(samples.seconds, 0.1)),
        "seconds_p90": float(np.quantile(samples.seconds, 0.9)),
        "plan_seconds_p50": float(np.median(samples.plan_seconds)),
        "read_peak_gb_per_s_min": float(samples.read.min()),
        "read_peak_gb_per_s_max": float(samples.read.max()),
        "scattered_read_gb_per_s_min": float(samples.scattered.min()),
        "scattered_read_gb_per_s_max": float(samples.scattered.max()),
        "mac_peak_g_per_s_min": float(samples.mac.min()),
        "mac_peak_g_per_s_max": float(samples.mac.max()),
        "repeats": len(samples.seconds),
    }


@dataclass(frozen=True)
class Roofline:
    """The roofline of one call.

    A call reads ``kv_bytes``, and does ``multiply_adds``: one per query head and element of a key or value. The machine
    reads scattered blocks at ``scattered_read`` GB/s, and does ``mac_peak`` 1e9 multiply-adds per second.
    """

    kv_bytes: int
    multiply_adds: int
    scattered_read: float
    mac_peak: float

    @property
    def arithmetic_gb_per_s(self) -> float:
        """The KV rate, in GB/s, at which multiply-adds would limit the call.

        Without a shared prefix it is the multiply-add peak times the bytes of an element, divided by query heads per KV
        head and by query tokens.
        """
        return self.mac_peak * self.kv_bytes / self.multiply_adds

    @property
    def limit(self) -> str:
        """The limit that binds: "reads" or "arithmetic"."""
        return "reads" if self.scattered_read <= self.arithmetic_gb_per_s else "arithmetic"

    @property
    def gb_per_s(self) -> float:
        """The highest possible KV rate of a call, in GB/s: min(scattered read, multiply-add peak × intensity)."""
        return min(self.scattered_read, self.arithmetic_gb_per_s)


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
    ("arithmetic_gb_per_s", "arithmetic", "{:>10.2f}"),
    ("limit", "limit", "{:>10}"),
    ("fraction_of_roofline", "of limit", "{:>8.3f}"),
    ("cached_tokens_per_second", "tokens/s", "{:>8.3g}"),
    ("tokens_over_bfloat16", "of bfloat16", "{:>11.3f}"),
    ("max_relative_error", "max error", "{:>9.1e}"),
)
"""Key, heading and format of each column of the Markdown table."""


class RowPrinter:
    """Prints rows through ``write``: table rows as soon as they are measured, or one JSON array at the end."""

    def __init__(self, output_format: str, write: Callable[[str], None]) -> None:
        self.output_format, self._write = output_format, write
        self._rows: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any]) -> None:
        """Print the measured ``row``; before the first row, the heading."""
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
        """Print what follows the last row, such as the JSON array."""
        if self.output_format == "json":
            self._write(to_json(self._rows))

    def _heading(self, row: dict[str, Any]) -> list[str]:
        if self.output_format == "md":
            widths = [len(form.format(0)) for _, _, form in COLUMNS]
            titles = [title.rjust(width) for (_, title, _), width in zip(COLUMNS, widths, strict=True)]
            return [_table_line(titles), _table_line(["-" * (len(title) - 1) + ":" for title in titles])]
        return [_csv_line(list(row))] if self.output_format == "csv" else []


def to_json(rows: Sequence[dict[str, Any]]) -> str:
    """Return a JSON array of rows."""
    return json.dumps(list(rows), indent=2, allow_nan=False)


def _table_line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _csv_line(cells: list[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(cells)
    return text.getvalue()
