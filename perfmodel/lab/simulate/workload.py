"""The requests of a simulation.

Their lengths come from published distributions or a trace, they arrive at any rate, and they record their outcome.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fastdecode.core.errors import ConfigError

TRACE_KEYS = ("timestamp", "input_length", "output_length")


@dataclass(eq=False)
class SimulatedRequest:
    """A prompt, exactly ``output_len`` tokens to generate, and the times of its events in simulated seconds.

    ``max_tokens``: the limit that the scheduler knows, for outputs that stop earlier; None for ``output_len``.
    ``prompt_token_ids``: never changed, so runs may share it; the values matter only to prefix caching.
    ``start_seconds``: the start of the first step with a row of this request. ``token_seconds``: ends of steps that
    gave it a token, float64 [tokens so far], once the run has ended.
    """

    prompt_token_ids: list[int]
    output_len: int
    arrival_seconds: float = 0.0
    start_seconds: float | None = None
    token_seconds: np.ndarray = field(default_factory=lambda: np.zeros(0))
    max_tokens: int | None = None

    @property
    def finished(self) -> bool:
        """True once the request has all its ``output_len`` tokens."""
        return len(self.token_seconds) == self.output_len

    @property
    def scheduling_delay_seconds(self) -> float:
        """Seconds from the request's arrival to the start of its first step; infinite if it never started."""
        return float("inf") if self.start_seconds is None else self.start_seconds - self.arrival_seconds

    @property
    def seconds_between_tokens(self) -> np.ndarray:
        """Seconds between consecutive tokens of this request, float64 [tokens − 1]."""
        return np.diff(self.token_seconds)


@dataclass(frozen=True)
class LogNormal:
    """A log-normal distribution of lengths with a given median and 90th percentile, the two figures in papers."""

    median: float
    p90: float

    def __post_init__(self) -> None:
        if not 1 <= self.median < self.p90 < math.inf:
            raise ConfigError(f"the median, {self.median:g}, must be from 1 to the 90th percentile, {self.p90:g}")

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Return ``count`` whole lengths of at least 1; int64."""
        # The standard normal distribution's 90th percentile
        z_p90 = 1.2815515655446004
        sigma = math.log(self.p90 / self.median) / z_p90
        lengths = np.exp(rng.normal(math.log(self.median), sigma, count))
        return np.maximum(np.rint(lengths), 1).astype(np.int64)


@dataclass(frozen=True)
class LengthDistribution:
    """Prompts and outputs, drawn independently; ``max_total`` bounds their sum.

    Sarathi-Serve drops longer pairs. Here the prompt is cut, so that the published percentiles stay.
    """

    prompt: LogNormal
    output: LogNormal
    max_total: int

    def draw(self, count: int, rng: np.random.Generator) -> list[tuple[int, int]]:
        """Return ``count`` pairs of prompt and output tokens."""
        outputs = np.minimum(self.output.draw(rng, count), self.max_total // 2)
        prompts = np.minimum(self.prompt.draw(rng, count), self.max_total - outputs)
        return list(zip(prompts.tolist(), outputs.tolist(), strict=True))


SARATHI = {
    "sarathi-chat": LengthDistribution(LogNormal(1730, 5696), LogNormal(415, 834), 8192),
    "sarathi-arxiv": LengthDistribution(LogNormal(7059, 12985), LogNormal(208, 371), 16384),
}
"""openchat_sharegpt4 and arxiv_summarization of Sarathi-Serve's Table 2, with its limits on the total."""


@dataclass(frozen=True)
class TraceItem:
    """A line of a trace: lengths in tokens, and arrival in seconds from the first."""

    arrival_seconds: float
    prompt_len: int
    output_len: int


def read_trace(text: str, name: str) -> list[TraceItem]:
    """Return the trace in JSONL, one object per line.

    An object is ``{"timestamp": seconds, "input_length": tokens, "output_length": tokens}``. Lines may be in any order.
    A ConfigError names a malformed one; ``name`` is the file's.
    """
    items = [_trace_item(record, where) for where, record in json_lines(text, name, f"with {', '.join(TRACE_KEYS)}")]
    if not items:
        raise ConfigError(f"{name}: the trace is empty")
    first = min(item.arrival_seconds for item in items)
    moved = [TraceItem(item.arrival_seconds - first, item.prompt_len, item.output_len) for item in items]
    return sorted(moved, key=lambda item: item.arrival_seconds)


def json_lines(text: str, name: str, wanted: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the objects of a JSON lines file, each with its file and line number in words.

    ``wanted``: the expected object, which a ConfigError quotes.
    """
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        try:
            found.append((where, json.loads(line)))
        except ValueError as error:
            raise ConfigError(f"{where}: not valid JSON: {error}") from None
        if not isinstance(found[-1][1], dict):
            raise ConfigError(f"{where}: must be an object {wanted}")
    return found


def _trace_item(record: dict[str, Any], where: str) -> TraceItem:
    values: list[Any] = [record.get(key) for key in TRACE_KEYS]
    moment, prompt_len, output_len = values
    if not isinstance(moment, int | float) or isinstance(moment, bool) or not math.isfinite(moment):
        raise ConfigError(f"{where}: timestamp must be a number of seconds, not {moment!r}")
    for key, length in zip(TRACE_KEYS[1:], values[1:], strict=True):
        if not isinstance(length, int) or isinstance(length, bool) or length < 1:
            raise ConfigError(f"{where}: {key} must be a whole number of at least 1 token, not {length!r}")
    return TraceItem(float(moment), prompt_len, output_len)


@dataclass(frozen=True)
class SimulatedWorkload:
    """Requests in order of arrival. ``arrivals``: seconds, float64 [n], if one request arrives per second on average.
    Other rates divide these seconds. ``own_rate``: recorded requests per second; infinite if all come at once.
    ``max_tokens``: the limit on every output that the scheduler knows, while outputs stop earlier; None if the
    scheduler knows the exact lengths.
    """

    prompts: Sequence[list[int]]
    output_lens: Sequence[int]
    arrivals: np.ndarray
    own_rate: float = math.inf
    max_tokens: int | None = None

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.prompts)

    def at(self, rate: float) -> list[SimulatedRequest]:
        """Return new requests that arrive at ``rate`` per second; infinite means all at once."""
        moments = (self.arrivals / rate).tolist()
        given = zip(self.prompts, self.output_lens, moments, strict=True)
        return [SimulatedRequest(*each, max_tokens=self.max_tokens) for each in given]

    @property
    def longest(self) -> int:
        """The most tokens that a prompt has together with its output."""
        return int((self.prompt_lens + np.array(self.output_lens)).max())

    @property
    def prompt_lens(self) -> np.ndarray:
        """Tokens of each prompt, int64 [n]."""
        return np.array([len(prompt) for prompt in self.prompts])


def drawn_workload(lengths: LengthDistribution, count: int, seed: int) -> SimulatedWorkload:
    """Return ``count`` requests with ``lengths`` and Poisson arrivals."""
    rng = np.random.default_rng(seed)
    pairs = lengths.draw(count, rng)
    return _of_lengths(pairs, np.cumsum(rng.exponential(1.0, count)), math.inf)


def traced_workload(items: Sequence[TraceItem]) -> SimulatedWorkload:
    """Return the requests of a trace with its own rate: ``len(items) - 1`` divided by the last arrival in seconds."""
    moments = np.array([item.arrival_seconds for item in items])
    rate = (len(items) - 1) / moments[-1] if moments[-1] > 0 else math.inf
    arrivals = moments * rate if rate < math.inf else moments
    return _of_lengths([(item.prompt_len, item.output_len) for item in items], arrivals, rate)


def _of_lengths(pairs: Sequence[tuple[int, int]], arrivals: np.ndarray, own_rate: float) -> SimulatedWorkload:
    """Return requests whose tokens are all 0, since only lengths are known."""
    return SimulatedWorkload([[0] * prompt for prompt, _ in pairs], [out for _, out in pairs], arrivals, own_rate)
