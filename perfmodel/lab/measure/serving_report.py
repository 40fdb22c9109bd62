"""The figures of ``bench serve`` with vLLM's keys and table. Times are printed in milliseconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fastdecode.core.errors import ConfigError
from fastdecode.perfmodel.lab.measure.serving import ServedRequest

METRICS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
"""Latencies reported with percentiles: key → name in the table, and heading."""

DETAILS = (
    "input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times", "generated_texts",
    "errors",
)  # fmt: skip
"""Keys with a value per request, which only ``--save-detailed`` saves."""


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """Return milliseconds by metric, from ["ttft:200", …]. A ConfigError names a wrong pair."""
    found: dict[str, float] = {}
    # Metrics with one value per request, which a service level objective may bound
    objectives = ("ttft", "tpot", "e2el")
    for pair in pairs:
        name, _, value = pair.partition(":")
        try:
            milliseconds = float(value)
        except ValueError:
            milliseconds = -1.0
        if name not in objectives or not milliseconds >= 0:
            raise ConfigError(
                f"goodput: {pair!r} must be NAME:MILLISECONDS, where NAME is one of {', '.join(objectives)}"
            )
        found[name] = milliseconds
    return found


def parse_metrics(text: str) -> list[str]:
    """Return names of METRICS from a comma-separated list. A ConfigError names an unknown one."""
    names = text.split(",")
    if unknown := [name for name in names if name not in METRICS]:
        raise ConfigError(f"percentile_metrics: {unknown[0]!r} is none of {', '.join(METRICS)}")
    return names


def parse_percentiles(text: str) -> list[float]:
    """Return percentages from a comma-separated list. A ConfigError names a wrong one."""
    try:
        percentiles = [float(part) for part in text.split(",")]
    except ValueError:
        percentiles = [-1.0]
    if not all(0 <= each <= 100 for each in percentiles):
        raise ConfigError(f"metric_percentiles must be a comma list of numbers from 0 to 100, not {text!r}")
    return percentiles


def serving_report(
    served: Sequence[ServedRequest],
    duration_seconds: float,
    goodput: Mapping[str, float],
    metrics: Sequence[str],
    percentiles: Sequence[float],
) -> dict[str, Any]:
    """Return the results for the report, without settings. Failed requests count only in ``failed``."""
    good = [request for request in served if not request.error]
    inputs, outputs = (sum(getattr(request, name) for request in good) for name in ("prompt_len", "output_len"))
    tokens_per_second, requests_per_second = _peaks(good)
    report = {
        "duration": duration_seconds,
        "completed": len(good),
        "failed": len(served) - len(good),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(good) / duration_seconds,
        "request_goodput": sum(_meets(request, goodput) for request in good) / duration_seconds if goodput else None,
        "output_throughput": outputs / duration_seconds,
        "total_token_throughput": (inputs + outputs) / duration_seconds,
        "input_lens": [request.prompt_len for request in served],
        "output_lens": [0 if request.error else request.output_len for request in served],
        "ttfts": [request.ttft for request in served],
        "itls": [request.itls for request in served],
        "latencies": [request.latency for request in served],
        "start_times": [request.start_seconds for request in served],
        "queue_times": [request.queue_seconds for request in served],
        "generated_texts": [request.text for request in served],
        "errors": [request.error for request in served],
        "max_output_tokens_per_s": tokens_per_second,
        "max_concurrent_requests": requests_per_second,
    }
    values = _values(good)
    for name in metrics:
        report |= _statistics(name, values[name], percentiles)
    return report


def _meets(request: ServedRequest, goodput: Mapping[str, float]) -> bool:
    """Return whether ``request`` met every objective in ``goodput``, which has milliseconds by metric."""
    found = {"ttft": request.ttft, "tpot": request.tpot, "e2el": request.latency}
    return all(found[name] * 1e3 <= milliseconds for name, milliseconds in goodput.items())


def _values(good: Sequence[ServedRequest]) -> dict[str, list[float]]:
    """Return the values of each metric, in seconds. A request of one token has no time per output token."""
    return {
        "ttft": [request.ttft for request in good],
        "tpot": [request.tpot for request in good if request.output_len > 1],
        "itl": [seconds for request in good for seconds in request.itls],
        "e2el": [request.latency for request in good],
    }


def _statistics(name: str, seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """Return mean, median and percentiles of ``seconds`` in milliseconds, by vLLM's keys; 0 without values."""
    values = np.array(seconds or [0.0]) * 1e3
    return {
        f"mean_{name}_ms": float(np.mean(values)),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(np.std(values)),
        **{f"p{each:g}_{name}_ms": float(np.percentile(values, each)) for each in percentiles},
    }


def _peaks(good: Sequence[ServedRequest]) -> tuple[float, int]:
    """Return the most tokens, and the most concurrent requests, in any one second of the run."""
    if not good:
        return 0.0, 0
    start = min(request.start_seconds for request in good)
    seconds = int(max(request.token_seconds[-1] for request in good) - start) + 1
    moments = np.concatenate([request.token_seconds for request in good]) - start
    under_way = np.zeros(seconds + 1, np.int64)
    np.add.at(under_way, [int(request.start_seconds - start) for request in good], 1)
    np.add.at(under_way, [int(request.token_seconds[-1] - start) + 1 for request in good], -1)
    return float(np.bincount(moments.astype(np.int64)).max()), int(np.cumsum(under_way).max())


def table_lines(report: Mapping[str, Any], metrics: Sequence[str]) -> Iterator[str]:
    """Yield vLLM's table "Serving Benchmark Result"."""
    width = 50
    yield f"{' Serving Benchmark Result ':=^{width}}"
    for label, key in _rows(report):
        value = report[key]
        shown = f"{value:.2f}" if isinstance(value, float) or key == "max_concurrent_requests" else value
        yield f"{label + ':':<40} {shown:<10}"
    for name in metrics:
        short, heading = METRICS[name]
        yield f"{heading:-^{width}}"
        for key, value in report.items():
            statistic = key.removesuffix(f"_{name}_ms")
            if statistic not in (key, "std"):
                yield f"{f'{statistic.capitalize()} {short} (ms):':<40} {value:<10.2f}"
    yield "=" * width


def _rows(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "Successful requests", "completed"
    yield "Failed requests", "failed"
    if report.get("max_concurrency") is not None:
        yield "Maximum request concurrency", "max_concurrency"
    if isinstance(report.get("request_rate"), float):  # not the text "inf"
        yield "Request rate configured (RPS)", "request_rate"
    yield "Benchmark duration (s)", "duration"
    yield "Total input tokens", "total_input_tokens"
    yield "Total generated tokens", "total_output_tokens"
    yield "Request throughput (req/s)", "request_throughput"
    if report["request_goodput"] is not None:
        yield "Request goodput (req/s)", "request_goodput"
    yield "Output token throughput (tok/s)", "output_throughput"
    yield "Peak output token throughput (tok/s)", "max_output_tokens_per_s"
    yield "Peak concurrent requests", "max_concurrent_requests"
    yield "Total token throughput (tok/s)", "total_token_throughput"
