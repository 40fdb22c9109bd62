"""Time to first token and bytes by method, prefill workers and prompt length, measured and predicted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fastdecode.perfmodel.calibration import summary
from fastdecode.perfmodel.lab.measure.prefill_calibrator import search_parts
from fastdecode.perfmodel.lab.measure.prefill_runs import PrefillRunner, PromptRun, in_order
from fastdecode.perfmodel.partition import PartitionEntry, PartitionTable, Parts, closed_form, even
from fastdecode.perfmodel.prefill_rates import measured_prefill_model
from fastdecode.perfmodel.prefill_times import PrefillTimes, chain_traffic_tokens, tsp_traffic_tokens
from fastdecode.perfmodel.profile import HardwareProfile

METHODS = ("kvr-e", "kvr-s", "kvr-p", "tsp")
"""Ways to share a prompt: even parts, searched parts, parts of a table that lacks this length, and all-gather (tsp)."""

ALONE = "alone"
"""The method of a single worker, where all methods are equal."""


@dataclass(frozen=True)
class PrefillRow:
    """A method's runs with ``num_workers`` and prompts of ``prefill_len`` tokens, cut into ``parts``.

    ``ttft_seconds_p50``: the median. ``ttft_seconds_spread``: 90th minus 10th percentile, divided by the median.
    ``…_bytes``: of keys and values over all layers; ``sent``: between prefill workers; ``stored``: on the R-worker.
    """

    method: str
    num_workers: int
    prefill_len: int
    parts: Parts
    ttft_seconds_p50: float
    ttft_seconds_spread: float
    predicted_ttft_seconds: float
    sent_bytes: int
    formula_sent_bytes: int
    stored_bytes: int
    formula_stored_bytes: int

    @property
    def prediction_error(self) -> float:
        """The prediction's relative error: predicted over measured time to first token, minus one."""
        return self.predicted_ttft_seconds / self.ttft_seconds_p50 - 1.0


@dataclass(frozen=True)
class PrefillBench:
    """Measures ways to compute a prompt on several prefill workers.

    ``profile``: the speeds of ``runner``'s workers, and optionally the table of cuts for method kvr-p.
    """

    runner: PrefillRunner
    profile: HardwareProfile
    methods: Sequence[str]
    repeats: int
    search_rounds: int = 1

    def rows(
        self, lengths: Sequence[int], worker_counts: Sequence[int], advance: Callable[[], object] = lambda: None
    ) -> Iterator[PrefillRow]:
        """Yield rows for every number of workers and length. Methods alternate, so that drift affects all of them."""
        for count in worker_counts:
            entries = self._searched(lengths, count, advance) if count > 1 else {}
            for num_tokens in lengths:
                parts = self._parts(num_tokens, count, entries)
                runs: dict[str, list[PromptRun]] = {method: [] for method in parts}
                for _ in range(self.repeats):
                    for method, found in runs.items():
                        jobs = [in_order(parts[method])]
                        found += self.runner.run(jobs, "tsp" if method == "tsp" else "kvr")
                        advance()
                yield from (self._row(method, parts[method], found) for method, found in runs.items())

    def _searched(self, lengths: Sequence[int], count: int, advance: Callable[[], object]) -> dict[int, PartitionEntry]:
        """Search the best cuts of each length for ``count`` workers, if a method needs them; return them by length."""
        if not searches(self.methods, lengths):
            return {}
        entries = {}
        for num_tokens in lengths:
            entries[num_tokens] = search_parts(self.profile, self.runner, num_tokens, count, self.search_rounds)
            advance()
        return entries

    def _parts(self, num_tokens: int, count: int, entries: dict[int, PartitionEntry]) -> dict[str, Parts]:
        if count == 1:
            return {ALONE: (num_tokens,)}
        parts = {"kvr-e": even(num_tokens, count), "tsp": even(num_tokens, count)}
        parts["kvr-p"] = self._predicted(num_tokens, count, entries)
        if entries:
            parts["kvr-s"] = entries[num_tokens].parts
        return {method: parts[method] for method in self.methods}

    def _predicted(self, num_tokens: int, count: int, entries: dict[int, PartitionEntry]) -> Parts:
        """Return kvr-p's parts: by the profile's table, else by other lengths' ``entries``, else by predicted times."""
        known = PartitionTable(self.profile.partitions)
        if not known.knows(count):
            known = PartitionTable([entry for length, entry in entries.items() if length != num_tokens])
        if known.knows(count):
            return known.parts(num_tokens, count)
        return closed_form(self._model(count), num_tokens, count)

    def _row(self, method: str, parts: Parts, runs: Sequence[PromptRun]) -> PrefillRow:
        found, model = summary(np.array([run.seconds for run in runs])), self._model(len(parts))
        traffic = tsp_traffic_tokens(parts) if method == "tsp" else chain_traffic_tokens(parts)
        predicted = model.tsp_seconds(parts) if method == "tsp" else model.chain_seconds(parts)[-1]
        token_bytes = round(model.kv_bytes * model.num_layers)
        return PrefillRow(
            method=method,
            num_workers=len(parts),
            prefill_len=sum(parts),
            parts=parts,
            ttft_seconds_p50=found.seconds,
            ttft_seconds_spread=found.spread,
            predicted_ttft_seconds=predicted,
            sent_bytes=max(run.sent_bytes for run in runs),
            formula_sent_bytes=traffic * token_bytes,
            stored_bytes=max(run.stored_bytes for run in runs),
            formula_stored_bytes=sum(parts) * token_bytes,
        )

    def _model(self, num_workers: int) -> PrefillTimes:
        return measured_prefill_model(self.profile, num_workers)


def searches(methods: Sequence[str], lengths: Sequence[int]) -> bool:
    """Return whether ``methods`` need searches for the best cuts: kvr-s does, and kvr-p if there are several lengths.
    Method kvr-p interpolates between the cuts found for other lengths.
    """
    return "kvr-s" in methods or ("kvr-p" in methods and len(lengths) > 1)


def num_measurements(methods: Sequence[str], lengths: Sequence[int], worker_counts: Sequence[int], repeats: int) -> int:
    """Return how often :meth:`PrefillBench.rows` calls ``advance``."""
    each = [repeats if count == 1 else repeats * len(methods) + searches(methods, lengths) for count in worker_counts]
    return len(lengths) * sum(each)


def report(rows: Sequence[PrefillRow]) -> dict[str, Any]:
    """Return the object of ``--output-json`` without ``config`` and ``machine``."""
    errors = [abs(row.prediction_error) for row in rows]
    return {
        "rows": [asdict(row) | _ratios(row, rows) for row in rows],
        "prediction_error": {"median": float(np.median(errors)), "max": max(errors)} if rows else None,
        "traffic_equals_formula": all(
            (row.sent_bytes, row.stored_bytes) == (row.formula_sent_bytes, row.formula_stored_bytes) for row in rows
        ),
    }


def table_lines(rows: Sequence[PrefillRow]) -> Iterator[str]:
    """Yield the lines of a text table of ``rows``."""
    yield "workers  tokens  method    TTFT s   ± %  predicted  error   /alone    /tsp  MB sent (formula)  parts"
    for row in rows:
        ratios = _ratios(row, rows)
        against = " ".join(_ratio(ratios[name]) for name in ("ttft_over_alone", "ttft_over_tsp"))
        sent = f"{row.sent_bytes / 1e6:8.1f} ({row.formula_sent_bytes / 1e6:.1f})"
        yield (
            f"{row.num_workers:7d} {row.prefill_len:7d}  {row.method:6s} {row.ttft_seconds_p50:9.3f} "
            f"{50 * row.ttft_seconds_spread:5.1f} {row.predicted_ttft_seconds:10.3f} {row.prediction_error:+6.1%}  "
            f"{against} {sent:>18s}  {' '.join(map(str, row.parts))}"
        )


def _ratios(row: PrefillRow, rows: Sequence[PrefillRow]) -> dict[str, float | None]:
    """Return the row's median TTFT relative to one worker's, and to TSP's on as many workers; None if not measured."""
    alike = {(each.method, each.num_workers): each for each in rows if each.prefill_len == row.prefill_len}
    alone, tsp = alike.get((ALONE, 1)), alike.get(("tsp", row.num_workers))
    return {
        "ttft_over_alone": row.ttft_seconds_p50 / alone.ttft_seconds_p50 if alone else None,
        "ttft_over_tsp": row.ttft_seconds_p50 / tsp.ttft_seconds_p50 if tsp else None,
    }


def _ratio(value: float | None) -> str:
    return f"{'–' if value is None else f'{value:.3f}':>7s}"
