"""Time until a prompt's first token if several prefill workers share it: a chain (KV-Runahead) or TSP.

A prompt of n tokens is cut into consecutive ``parts``, the rows of each worker in order. Worker i attends to all keys
and values up to its own end. So work grows with i, and parts of equal work have unequal lengths. Equations and sections
are those of KV-Runahead (ICML 2024).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from fastdecode.core.errors import ConfigError
from fastdecode.perfmodel.stages import SPart


@dataclass(frozen=True)
class PromptAttentionTimes:
    """The time of one layer's attention in a part of a prompt: ``pair_seconds`` per computed (query, key) pair.

    Kernels compute a causal triangle in tiles of ``tile_rows`` queries, each with all keys up to the tile's end.
    """

    pair_seconds: float
    tile_rows: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.pair_seconds < math.inf or self.tile_rows < 1:
            raise ConfigError(
                f"attention must take finite seconds above zero per pair, and tiles must have at least one row, "
                f"not {self.pair_seconds!r} and {self.tile_rows}"
            )

    def pairs(self, rows: int, context: int) -> float:
        """Return how many (query, key) pairs ``rows`` queries compute over ``context`` earlier keys and their own."""
        return rows * context + triangle_pairs(rows, self.tile_rows)

    def seconds(self, rows: int, context: int) -> float:
        """Return the seconds of attention of a chain's part with ``rows`` queries after ``context`` earlier tokens."""
        return self.pair_seconds * self.pairs(rows, context)

    def square_seconds(self, rows: int, num_keys: int) -> float:
        """Return the seconds of ``rows`` queries over all ``num_keys``, as TSP computes them (section 4.1)."""
        return self.pair_seconds * rows * num_keys


def triangle_pairs(rows: int, tile_rows: int) -> float:
    """Return the pairs of a causal triangle of ``rows`` queries, with whole tiles: rows²/2 plus the waste."""
    full, rest = divmod(rows, tile_rows)
    return tile_rows * tile_rows * full * (full + 1) / 2 + rest * rows


@dataclass(frozen=True)
class PrefillLink:
    """The link from one prefill worker to the next. It sends one layer after another while both workers compute."""

    bytes_per_second: float = math.inf
    latency_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.bytes_per_second > 0 or not 0 <= self.latency_seconds < math.inf:
            raise ConfigError("a link must have a bandwidth above zero, and a latency of at least zero")

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds that the link is busy with ``num_bytes``, without latency."""
        return num_bytes / self.bytes_per_second


@dataclass(frozen=True)
class SlowerSPart:
    """An S-part that is ``factor`` times slower."""

    s_part: SPart
    factor: float

    def layer_seconds(self, rows: float) -> float:
        """Return the seconds of one layer except attention for ``rows`` rows."""
        return self.factor * self.s_part.layer_seconds(rows)

    def head_seconds(self, rows: float) -> float:
        """Return the seconds of the output projection for ``rows`` rows."""
        return self.factor * self.s_part.head_seconds(rows)


class PartSeconds(NamedTuple):
    """The seconds of one layer of one part: matrix products before attention, attention, and products after it."""

    before: float
    attention: float
    after: float

    @property
    def all(self) -> float:
        """The part's seconds without waiting: both products and attention."""
        return self.before + self.attention + self.after


@dataclass(frozen=True)
class PrefillTimes:
    """Times of prefill workers. Methods take the relative speed of each worker as an argument.

    ``kv_bytes``: of one token's keys and values in one layer. ``stored_kv_bytes``: of a prefix token, sent in the
    R-workers' form; None: ``kv_bytes``. ``before_share``: the part of a layer's products that precedes attention (q,
    k and v). ``job_seconds``: once per prompt, to send it and its result.
    """

    num_layers: int
    s_part: SPart
    attention: PromptAttentionTimes
    kv_bytes: float
    link: PrefillLink = PrefillLink()
    before_share: float = 1 / 4
    job_seconds: float = 0.0
    stored_kv_bytes: float | None = None

    def __post_init__(self) -> None:
        if self.num_layers < 1 or not 0 <= self.before_share <= 1 or self.kv_bytes < 0 or self.job_seconds < 0:
            raise ConfigError("a model has at least one layer, and shares, bytes and seconds of at least zero")

    def part_seconds(self, rows: int, context: int, speed: float = 1.0) -> PartSeconds:
        """Return the seconds of one layer of a part: ``rows`` rows after ``context`` tokens, at relative ``speed``."""
        products = self.s_part.layer_seconds(rows) / speed
        before = self.before_share * products
        return PartSeconds(before, self.attention.seconds(rows, context) / speed, products - before)

    def chain_seconds(
        self, parts: Sequence[int], speeds: Sequence[float] = (), context_len: int = 0
    ) -> tuple[float, ...]:
        """Return when each worker of the chain is done, in seconds from the prompt's arrival.

        ::

            worker 0  |qkv 0|attention 0|rest 0|qkv 1|attention 1|…
                           └ k, v of layer 0 of part 0
            worker 1  |qkv 0|  wait      |attention 0|rest 0|qkv 1|…
                                └ k, v of layer 0 of parts 0 and 1
            worker 2  |qkv 0|  wait                   |attention 0|…

        The last worker computes the first token. A worker sends a layer's keys and values on when it has those of the
        earlier parts and of its own (section 4.2, figure 5). The link sends one layer after another while the worker
        computes. A prefix of ``context_len`` tokens reaches worker 0 over such a link too.
        """
        arrivals = [0.0] * self.num_layers
        if context_len:
            arrivals = self._arrivals(arrivals, self.link_seconds(0, context_len))
        done = []
        speeds = speeds or (1.0,) * len(parts)
        ends = [context_len + end for end in itertools.accumulate(parts)]
        for rows, end, speed in zip(parts, ends, speeds, strict=True):
            part = self.part_seconds(rows, end - rows, speed)
            free, sends = 0.0, []
            for arrival in arrivals:
                ready = max(free + part.before, arrival)
                sends.append(ready)
                free = ready + part.attention + part.after
            arrivals = self._arrivals(sends, self.link_seconds(end - context_len, context_len))
            done.append(self.job_seconds + free)
        done[-1] += self.s_part.head_seconds(1) / speeds[-1]
        return tuple(done)

    def tsp_seconds(self, parts: Sequence[int], speeds: Sequence[float] = ()) -> float:
        """Return the seconds of tensor/sequence parallel, where all workers gather all keys and values in every layer.

        The workers gather in a ring, and begin attention after it. Each worker's attention also computes the pairs that
        causality excludes (section 4.1, figure 4).
        """
        speeds, num_tokens = list(speeds) or [1.0] * len(parts), sum(parts)
        workers = list(zip(parts, speeds, strict=True))
        products = [(self.s_part.layer_seconds(rows) / speed, rows, speed) for rows, speed in workers]
        before = max(self.before_share * seconds for seconds, _, _ in products)
        after = max(
            (1 - self.before_share) * seconds + self.attention.square_seconds(rows, num_tokens) / speed
            for seconds, rows, speed in products
        )
        turn = self.link.latency_seconds + self.link.seconds(max(parts) * self.kv_bytes)
        gather = (len(parts) - 1) * turn
        head = self.s_part.head_seconds(1) / speeds[-1]
        return self.job_seconds + self.num_layers * (before + gather + after) + head

    def times(self, factor: float) -> PrefillTimes:
        """Return a copy of these times with products and attention ``factor`` times slower."""
        attention = replace(self.attention, pair_seconds=factor * self.attention.pair_seconds)
        return replace(self, s_part=SlowerSPart(self.s_part, factor), attention=attention)

    def alone_seconds(self, num_tokens: int, speed: float = 1.0, context_len: int = 0) -> float:
        """Return the seconds until one worker has computed ``num_tokens`` after a prefix of ``context_len`` tokens."""
        return self.chain_seconds((num_tokens,), (speed,), context_len)[-1]

    def link_seconds(self, rows: int, context_len: int) -> float:
        """Return the link's busy seconds for one layer's keys and values of ``rows`` tokens and their prefix."""
        stored = self.kv_bytes if self.stored_kv_bytes is None else self.stored_kv_bytes
        return self.link.seconds(rows * self.kv_bytes + context_len * stored)

    def _arrivals(self, sends: Sequence[float], busy_seconds: float) -> list[float]:
        """Return the seconds at which the next worker has each layer's keys and values, ready at ``sends``."""
        free, arrivals = 0.0, []
        for ready in sends:
            free = max(free, ready) + busy_seconds
            arrivals.append(free + self.link.latency_seconds)
        return arrivals


def chain_traffic_tokens(parts: Sequence[int], context_len: int = 0) -> int:
    """Return how many tokens' keys and values cross the chain's links per layer: equations 6, 7 for uneven parts.

    Worker i sends all up to its part's end, so the sum is Σ_{i<p} end_i. Even parts give n·(p − 1)/2, half of TSP's.
    All workers but the last also pass a prefix of c tokens on, c·(p − 1) more. The c tokens from the R-worker to the
    first one do not count.
    """
    return sum(list(itertools.accumulate(parts))[:-1]) + context_len * (len(parts) - 1)


def tsp_traffic_tokens(parts: Sequence[int]) -> int:
    """Return the tokens of an all-gather, n·(p − 1): every worker gets the others' parts (equations 4 and 5)."""
    return sum(parts) * (len(parts) - 1)
