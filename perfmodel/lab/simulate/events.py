"""Events of a simulated machine's workers, from a file or at random."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np

from fastdecode.core.errors import ConfigError
from fastdecode.perfmodel.lab.simulate.workload import json_lines

LOSE, JOIN, DRAIN, SLOW = KINDS = ("lose", "join", "drain", "slow")
NAMES = ("r_worker", "prefill_worker")
KEYS = {"seconds", "event", "factor", *NAMES}


@dataclass(frozen=True)
class WorkerEvent:
    """An event at ``seconds`` of simulated time: a worker is lost, joins, drains, or becomes ``factor`` times slower.

    ``worker``: the machine's number from 0, separately for R-workers and prefill workers (``is_prefill``). A lost or
    dismissed machine keeps its number and may join again; a new one has the next number. ``factor``: relative to its
    initial speed; 1 ends a slowdown.
    """

    seconds: float
    kind: str
    worker: int
    is_prefill: bool = False
    factor: float = 1.0


def read_events(text: str, name: str, num_r_workers: int, num_prefill_workers: int = 0) -> list[WorkerEvent]:
    """Return the events in JSON lines ``{"seconds": 12.5, "event": "lose", "r_worker": 3}``, in any order of time.

    ``event``: lose, join, drain, or slow with a ``factor``. ``prefill_worker`` may replace ``r_worker``. A ConfigError
    names the first malformed line, or unknown worker; ``name`` is the file's.
    """
    such_as = 'such as {"seconds": 12.5, "event": "lose", "r_worker": 3}'
    found = [(_event(record, where), where) for where, record in json_lines(text, name, such_as)]
    if not found:
        raise ConfigError(f"{name}: the file has no events")
    found.sort(key=lambda each: each[0].seconds)
    known = {False: num_r_workers, True: num_prefill_workers}
    for event, where in found:
        _check_worker(event, known[event.is_prefill], where)
        known[event.is_prefill] += event.kind == JOIN and event.worker == known[event.is_prefill]
    return [event for event, _ in found]


def _event(record: dict[str, Any], where: str) -> WorkerEvent:
    if unknown := sorted(set(record) - KEYS):
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}; an event has the keys {', '.join(sorted(KEYS))}")
    seconds, kind = record.get("seconds"), record.get("event")
    if not _is_number(seconds) or not 0 <= seconds < math.inf:
        raise ConfigError(f"{where}: seconds must be a number of at least 0, not {seconds!r}")
    if kind not in KINDS:
        raise ConfigError(f"{where}: event must be one of {', '.join(KINDS)}, not {kind!r}")
    named = [key for key in NAMES if key in record]
    if len(named) != 1:
        raise ConfigError(f"{where}: name one worker, as r_worker or as prefill_worker")
    worker = record[named[0]]
    if not isinstance(worker, int) or isinstance(worker, bool) or worker < 0:
        raise ConfigError(f"{where}: {named[0]} must be a whole number of at least 0, not {worker!r}")
    return WorkerEvent(float(seconds), kind, worker, named[0] == NAMES[1], _factor(record, kind, where))


def _factor(record: dict[str, Any], kind: str, where: str) -> float:
    if kind != SLOW:
        if "factor" in record:
            raise ConfigError(f"{where}: factor belongs to slow, not to {kind}")
        return 1.0
    factor = record.get("factor")
    if not _is_number(factor) or not 0 < factor < math.inf:
        raise ConfigError(f"{where}: slow needs a factor above 0, such as 2.0, not {factor!r}")
    return float(factor)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_worker(event: WorkerEvent, num_known: int, where: str) -> None:
    name = NAMES[event.is_prefill]
    if event.kind == JOIN and event.worker > num_known:
        raise ConfigError(f"{where}: {name} {event.worker} joins, and the next new one must have number {num_known}")
    if event.kind != JOIN and event.worker >= num_known:
        there = f"there are {num_known}, from 0 on" if num_known else "there are none"
        raise ConfigError(f"{where}: there is no {name} {event.worker} at {event.seconds:g} s; {there}")


def random_losses(num_r_workers: int, mtbf_hours: float, restart_seconds: float, seed: int) -> Iterator[WorkerEvent]:
    """Yield losses without end, in order. Each R-worker is lost ``mtbf_hours`` after it joined, on average.

    The R-worker joins again ``restart_seconds`` later. Each R-worker has its own random generator, so its
    losses do not depend on the number of R-workers.
    """

    def of_one(worker: int) -> Iterator[WorkerEvent]:
        rng, moment = np.random.default_rng((seed, worker)), 0.0
        seconds_per_hour = 3600.0
        while True:
            moment += rng.exponential(mtbf_hours * seconds_per_hour)
            yield WorkerEvent(moment, LOSE, worker)
            moment += restart_seconds
            yield WorkerEvent(moment, JOIN, worker)

    return heapq.merge(*map(of_one, range(num_r_workers)), key=lambda event: event.seconds)


class Timeline:
    """Events in order of time, from any number of sources that are each in order."""

    def __init__(self, *sources: Iterable[WorkerEvent]) -> None:
        self._events = heapq.merge(*sources, key=lambda event: event.seconds)
        self._next = next(self._events, None)

    @property
    def next_seconds(self) -> float:
        """The simulated seconds at which the next event happens; infinite if no event remains."""
        return math.inf if self._next is None else self._next.seconds

    def due(self, now_seconds: float) -> Iterator[WorkerEvent]:
        """Yield, once each, the events up to the simulated time ``now_seconds``."""
        while self._next is not None and self._next.seconds <= now_seconds:
            event, self._next = self._next, next(self._events, None)
            yield event
