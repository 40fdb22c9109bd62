"""Whom a simulation serves: lengths of prompts and outputs from published distributions or a trace, and arrivals."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastdecode.errors import ConfigError

Z_P90 = 1.2815515655446004
"""The standard normal distribution's 90th percentile."""

TRACE_KEYS = ("timestamp", "input_length", "output_length")


@dataclass(frozen=True)
class LogNormal:
    """Lengths by their median and 90th percentile, the two figures papers print; a log-normal through both."""

    median: float
    p90: float

    def __post_init__(self) -> None:
        if not 1 <= self.median < self.p90 < math.inf:
            raise ConfigError(f"a median of {self.median:g} and a 90th percentile of {self.p90:g} tokens cannot be")

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """``count`` whole lengths of at least 1; int64."""
        sigma = math.log(self.p90 / self.median) / Z_P90
        lengths = np.exp(rng.normal(math.log(self.median), sigma, count))
        return np.maximum(np.rint(lengths), 1).astype(np.int64)


@dataclass(frozen=True)
class LengthDistribution:
    """Prompts and outputs, drawn independently; ``max_total`` bounds their sum.

    Sarathi-Serve drops what is longer; here such a prompt is cut, so that the printed percentiles stay.
    """

    prompt: LogNormal
    output: LogNormal
    max_total: int

    def draw(self, count: int, rng: np.random.Generator) -> list[tuple[int, int]]:
        """``count`` pairs of prompt and output tokens."""
        outputs = np.minimum(self.output.draw(rng, count), self.max_total // 2)
        prompts = np.minimum(self.prompt.draw(rng, count), self.max_total - outputs)
        return list(zip(prompts.tolist(), outputs.tolist(), strict=True))


SARATHI = {
    "sarathi-chat": LengthDistribution(LogNormal(1730, 5696), LogNormal(415, 834), 8192),
    "sarathi-arxiv": LengthDistribution(LogNormal(7059, 12985), LogNormal(208, 371), 16384),
}
"""openchat_sharegpt4 and arxiv_summarization as Sarathi-Serve's Table 2 has them, with its limits on the total."""


@dataclass(frozen=True)
class TraceItem:
    """A line of a trace: lengths in tokens, arrival in seconds from the first."""

    arrival_seconds: float
    prompt_len: int
    output_len: int


def read_trace(text: str, name: str) -> list[TraceItem]:
    """JSONL, one ``{"timestamp": seconds, "input_length": tokens, "output_length": tokens}`` per line, in any order.

    ConfigError names the line that is not so; ``name`` is the file's.
    """
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    items = [_trace_item(line, f"{name}, line {number}") for number, line in lines]
    if not items:
        raise ConfigError(f"{name}: the trace is empty")
    first = min(item.arrival_seconds for item in items)
    moved = [TraceItem(item.arrival_seconds - first, item.prompt_len, item.output_len) for item in items]
    return sorted(moved, key=lambda item: item.arrival_seconds)


def _trace_item(line: str, where: str) -> TraceItem:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: must be an object with {', '.join(TRACE_KEYS)}")
    values: list[Any] = [record.get(key) for key in TRACE_KEYS]
    moment, prompt_len, output_len = values
    if not isinstance(moment, int | float) or isinstance(moment, bool) or not math.isfinite(moment):
        raise ConfigError(f"{where}: timestamp must be a number of seconds, not {moment!r}")
    for key, length in zip(TRACE_KEYS[1:], values[1:], strict=True):
        if not isinstance(length, int) or isinstance(length, bool) or length < 1:
            raise ConfigError(f"{where}: {key} must be a whole number of at least 1 token, not {length!r}")
    return TraceItem(float(moment), prompt_len, output_len)
