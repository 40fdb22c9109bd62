"""Cuts a prompt into parts for a chain of prefill workers: evenly, by predicted times, by search, or from a table.

The names are the KV-Runahead paper's: KVR-E, KVR-S and KVR-P. Parts are the rows of each worker in order. They cover
the prompt exactly, and none is empty if there are enough tokens.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fastdecode.core.errors import ConfigError
from fastdecode.perfmodel.prefill_times import PrefillTimes

Parts = tuple[int, ...]
Measure = Callable[[Parts], float]
"""A function from parts to the seconds until the first token, measured or predicted."""

GRID = (-2, -1, 0, 1, 2)
"""Strides from the present best cut that the paper's grid tries (figure 6, appendix D)."""


def even(num_tokens: int, num_workers: int) -> Parts:
    """Return the parts of KVR-E: their lengths differ by at most one, longer ones first."""
    whole, rest = divmod(num_tokens, num_workers)
    return tuple(whole + (worker < rest) for worker in range(num_workers))


def of_fractions(num_tokens: int, fractions: Sequence[float]) -> Parts:
    """Return the parts, in tokens, nearest to ``fractions`` of the prompt. The fractions add up to 1."""
    ends = [round(num_tokens * part) for part in itertools.accumulate(fractions)]
    return _of_cuts(num_tokens, _in_order(ends[:-1], num_tokens))


def closed_form(
    model: PrefillTimes, num_tokens: int, num_workers: int, speeds: Sequence[float] = (), context_len: int = 0
) -> Parts:
    """Return the parts that all workers finish at the same time according to ``model``, in closed form.

    After a prefix of c tokens, one layer takes W(e) = a'·e + b·e²/2 seconds for the first e tokens, with a' = a + b·c:
    a is a row's products, b a pair. Part i takes w_i: W at its end minus W at its start. Worker i begins its first
    attention d_i later than worker 0, when all earlier keys and values have come. With speeds s_i and L layers, all end
    at F = d_i + L·w_i / s_i, and Σ w_i = W(n) gives F. Each cut is where W reaches the sum of the earlier w.
    """
    speeds = list(speeds) or [1.0] * num_workers
    attention = model.attention
    rows = max(num_tokens // num_workers, 1)
    per_row = model.s_part.layer_seconds(rows) / rows
    per_pair = attention.pair_seconds
    per_row += per_pair * min(attention.tile_rows, rows) / 2  # tiles also compute pairs that causality excludes
    per_row += per_pair * context_len
    delays = _delays(model, num_tokens, num_workers, speeds, context_len)
    work = model.num_layers * (per_row * num_tokens + per_pair * num_tokens**2 / 2)
    end_seconds = (work + sum(s * d for s, d in zip(speeds, delays, strict=True))) / sum(speeds)
    shares = [max(s * (end_seconds - d), 0.0) for s, d in zip(speeds, delays, strict=True)]
    scale = work / (sum(shares) * model.num_layers)
    sums = itertools.accumulate(scale * share for share in shares[:-1])
    cuts = [round((math.sqrt(per_row**2 + 2 * per_pair * each) - per_row) / per_pair) for each in sums]
    return _of_cuts(num_tokens, _in_order(cuts, num_tokens))


def balanced(model: PrefillTimes, num_tokens: int, num_workers: int) -> Parts:
    """Return parts that all workers finish at the same time F, found by bisection, with tiles and fixed costs."""
    delays = _delays(model, num_tokens, num_workers, [1.0] * num_workers, 0)

    def filled(end_seconds: float) -> Parts:
        """Return parts: each worker gets the tokens it can compute by ``end_seconds``, the last one all that remain."""
        done, parts = 0, []
        for delay in delays[:-1]:
            parts.append(_most_rows(model, done, (end_seconds - delay) / model.num_layers, num_tokens - done))
            done += parts[-1]
        return (*parts, num_tokens - done)

    low, high = 0.0, model.alone_seconds(num_tokens) + delays[-1]
    # Bisections of the end time in :func:`balanced`, for a relative error of 1e-7
    bisections = 24
    for _ in range(bisections):
        middle = (low + high) / 2
        parts = filled(middle)
        last = delays[-1] + model.num_layers * model.part_seconds(parts[-1], num_tokens - parts[-1]).all
        low, high = (low, middle) if last <= middle else (middle, high)
    return _of_cuts(num_tokens, _in_order(list(itertools.accumulate(filled(high)))[:-1], num_tokens))


def _most_rows(model: PrefillTimes, context: int, layer_seconds: float, most: int) -> int:
    """Return how many tokens (at most ``most``) after ``context`` a layer computes within ``layer_seconds``."""
    return bisect_right(range(1, most + 1), layer_seconds, key=lambda n: model.part_seconds(n, context).all)


def _delays(
    model: PrefillTimes, num_tokens: int, num_workers: int, speeds: Sequence[float], context_len: int
) -> list[float]:
    """Return, per worker, the seconds by which its first attention begins later than the first worker's."""
    rows = max(num_tokens // num_workers, 1)
    before = [model.part_seconds(rows, 0, speed).before for speed in speeds]
    ready = [before[0]]
    for worker in range(1, num_workers):
        sent = model.link.latency_seconds + model.link_seconds(worker * rows, context_len)
        ready.append(max(before[worker], ready[-1] + sent))
    return [each - before[0] for each in ready]


def searched(measure: Measure, start: Parts, least_stride: int = 1, first_stride: int | None = None) -> Parts:
    """Return the best parts of a hierarchical grid search from ``start`` (KVR-S), never worse than even ones.

    Each level tries all combinations of ``GRID`` strides for the cuts, moves while that helps, and then halves the
    stride, down to ``least_stride``. With one cut this is a binary search (figure 6). ``first_stride``: by default an
    eighth of the prompt per worker; a smaller one suffices for a good ``start``. Nothing is measured twice.
    """
    num_tokens, cuts = sum(start), tuple(itertools.accumulate(start))[:-1]
    known: dict[Parts, float] = {}

    def seconds(cuts: Sequence[int]) -> float:
        parts = _of_cuts(num_tokens, cuts)
        if parts not in known:
            known[parts] = measure(parts)
        return known[parts]

    seconds(tuple(itertools.accumulate(even(num_tokens, len(start))))[:-1])
    seconds(cuts)
    stride = first_stride or max(num_tokens // (8 * len(start)), 1)
    while True:
        stride = max(stride, least_stride)
        cuts = _best_near(seconds, cuts, num_tokens, stride)
        if stride == least_stride:
            return min(known, key=lambda parts: known[parts])
        stride //= 2


def _best_near(
    seconds: Callable[[Sequence[int]], float], cuts: tuple[int, ...], num_tokens: int, stride: int
) -> tuple[int, ...]:
    """Return cuts near ``cuts`` that moving neighbouring cuts by multiples of ``stride`` does not improve.
    ``seconds``: measures the time with given cuts.
    """
    # Cuts that one grid moves together; with more workers, grids of neighbouring cuts take turns
    cuts_together = 3
    groups = [
        range(first, min(first + cuts_together, len(cuts))) for first in range(max(1, len(cuts) - cuts_together + 1))
    ]
    while True:
        before = cuts
        for group in groups:
            near = (_moved(cuts, group, steps, stride) for steps in itertools.product(GRID, repeat=len(group)))
            inside = [each for each in near if _is_inside(each, num_tokens)]
            cuts = min([cuts, *inside], key=seconds)
        if cuts == before:
            return cuts


def _moved(cuts: tuple[int, ...], group: range, steps: Sequence[int], stride: int) -> tuple[int, ...]:
    moved = list(cuts)
    for place, step in zip(group, steps, strict=True):
        moved[place] += step * stride
    return tuple(moved)


def _is_inside(cuts: Sequence[int], num_tokens: int) -> bool:
    """Return whether ``cuts`` give every part of ``num_tokens`` at least one token."""
    ends = (0, *cuts, num_tokens)
    return all(first < last for first, last in itertools.pairwise(ends))


def _in_order(cuts: Sequence[int], num_tokens: int) -> list[int]:
    """Return ``cuts`` moved as little as possible so that every part has a token, if there are enough tokens."""
    after = len(cuts)
    kept: list[int] = []
    for place, cut in enumerate(cuts):
        least = (kept[-1] if kept else 0) + 1
        kept.append(min(max(cut, least), max(num_tokens - (after - place), 0)))
    return kept


def _of_cuts(num_tokens: int, cuts: Sequence[int]) -> Parts:
    ends = (*cuts, num_tokens)
    return tuple(last - first for first, last in itertools.pairwise((0, *ends)))


@dataclass(frozen=True)
class PartitionEntry:
    """The best parts found for a prompt of ``num_tokens``, in order."""

    num_tokens: int
    parts: Parts

    def __post_init__(self) -> None:
        if not self.parts or min(self.parts) < 1 or sum(self.parts) != self.num_tokens:
            raise ConfigError(
                f"the parts of a prompt of {self.num_tokens} tokens must be at least 1 and add up to it, "
                f"not {list(self.parts)}"
            )

    @property
    def fractions(self) -> tuple[float, ...]:
        """Each part's length as a fraction of the prompt."""
        return tuple(part / self.num_tokens for part in self.parts)


class PartitionTable:
    """KVR-P: parts for any prompt, interpolated from a few lengths (section 4.2)."""

    def __init__(self, entries: Sequence[PartitionEntry]) -> None:
        """``entries``: for any numbers of workers, at most one per number and length."""
        self._by_workers: dict[int, list[PartitionEntry]] = {}
        for entry in sorted(entries, key=lambda entry: entry.num_tokens):
            known = self._by_workers.setdefault(len(entry.parts), [])
            if known and known[-1].num_tokens == entry.num_tokens:
                raise ConfigError(
                    f"the table has {entry.num_tokens} tokens on {len(entry.parts)} workers twice; keep one"
                )
            known.append(entry)

    def knows(self, num_workers: int) -> bool:
        """Return whether the table has an entry for ``num_workers`` workers."""
        return num_workers in self._by_workers

    def parts(self, num_tokens: int, num_workers: int) -> Parts:
        """Return parts, with fractions interpolated linearly between the table's lengths, and constant beyond them.

        Raise KeyError without an entry for ``num_workers``.
        """
        entries = self._by_workers[num_workers]
        above = bisect_right([entry.num_tokens for entry in entries], num_tokens)
        low, high = entries[max(above - 1, 0)], entries[min(above, len(entries) - 1)]
        if low.num_tokens == num_tokens:
            return low.parts
        span = high.num_tokens - low.num_tokens
        weight = (num_tokens - low.num_tokens) / span if span else 0.0
        pairs = zip(low.fractions, high.fractions, strict=True)
        return of_fractions(num_tokens, [a + weight * (b - a) for a, b in pairs])


NO_TABLE = PartitionTable(())


@dataclass(frozen=True)
class Forecast:
    """Predicts, for the scheduler's policy, how to cut a prompt and when each worker finishes its part.

    Parts come from ``table`` if it has this number of workers, and they are equally fast; else from the closed form.
    ``method``: "kvr", or "tsp" with even parts. After a cached prefix of ``context_len`` tokens, which the table does
    not cover, the closed form of a chain is used.
    """

    model: PrefillTimes
    table: PartitionTable = NO_TABLE
    method: str = "kvr"

    def parts(self, num_tokens: int, speeds: Sequence[float], context_len: int = 0) -> Parts:
        """Return each worker's number of tokens, in order. ``speeds``: relative speeds of the workers."""
        if context_len:
            return closed_form(self.model, num_tokens, len(speeds), speeds, context_len)
        if self.method == "tsp":
            return even(num_tokens, len(speeds))
        # Workers whose speeds differ by less than this use the table's parts, which were found for equally fast workers
        alike = 1.1
        if self.table.knows(len(speeds)) and max(speeds) < alike * min(speeds):
            return self.table.parts(num_tokens, len(speeds))
        return closed_form(self.model, num_tokens, len(speeds), speeds)

    def seconds(self, parts: Sequence[int], speeds: Sequence[float], context_len: int = 0) -> tuple[float, ...]:
        """Return the seconds after which each worker is done. The last worker produces the first token."""
        if self.method == "tsp" and not context_len:
            return (self.model.tsp_seconds(parts, speeds),) * len(parts)
        return self.model.chain_seconds(parts, speeds, context_len)
