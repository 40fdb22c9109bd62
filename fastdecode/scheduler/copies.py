"""Second copies (``kv_replicas``): who attends in each step, and which copy is made next."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fastdecode.scheduler.admission import Admission
from fastdecode.scheduler.migration import Move
from fastdecode.scheduler.recent_speeds import RecentSpeeds
from fastdecode.scheduler.residents import Residents
from fastdecode.scheduler.sequence import Sequence

SHARE = 0.1
"""Of the steps' time, what making second copies may take: decodes wait meanwhile."""

EVEN = 1.002
"""The busiest R-worker's time over the mean, from which on nothing is swapped."""

MOST_SWAPS = 64
"""In one step; what is uneven beyond them is evened in the next."""

UNEVEN_HOLDERS = 0.9
"""An R-worker that holds less than this part of the mean, by its speed, is given second copies of others."""


class Copies:
    """Every sequence that two R-workers hold may attend on either, so the load is evened anew in each step without a
    move; and a lost R-worker's sequences go on from their other copies.

    A prompt without a cached prefix is stored on both R-workers while it is computed. Whatever else has a single copy
    gets its second one between steps, some at a time.
    """

    def __init__(self, residents: Residents, admission: Admission) -> None:
        self._residents, self._admission = residents, admission
        self._workers = residents.workers
        self._credit = 0.0
        self._joined: list[int] = []
        self.speeds = RecentSpeeds(residents.workers)

    def observe(self, step_seconds: float) -> None:
        """A step took so long: a part of that may go to copies."""
        self._credit = min(self._credit + SHARE * step_seconds, SHARE * step_seconds)

    def made(self, move: Move, seconds: float) -> None:
        """The second copy is there, after ``seconds``."""
        self._residents.add_copy(move.sequence, move.target)
        self._credit -= seconds

    def joined(self, worker: int) -> None:
        """R-worker ``worker`` holds nothing yet."""
        self._joined.append(worker)
        self.speeds.forget(worker)

    def leave_draining(self) -> None:
        """What R-workers that drain hold, and others too, is theirs no more."""
        for worker in self._workers.draining:
            for sequence in self._residents.on(worker):
                if len(sequence.holders) > 1:
                    self._residents.drop_holder(sequence, worker)

    def next(self) -> Move | None:
        """The second copy to make now, if there is one and the time for it."""
        if self._credit <= 0:
            return None
        for sequence in self._lacking():
            if (target := self._admission.copy_worker(sequence)) >= 0:
                return self._copy(sequence, target)
        return self._evening()

    def choose(self) -> None:
        """Have each sequence that decodes attend on that one of its holders that makes all R-workers take as long."""
        table = self._residents.table
        rows = table.rows[table.copies[table.rows] >= 0]
        if not len(rows):
            return
        speeds = self.speeds.speeds
        seconds = table.kv_loads(len(self._workers)) / speeds
        present = np.array(self._workers.present)
        mean = float((seconds[present] * speeds[present]).sum() / speeds[present].sum())
        choice = _Choice(table.workers[rows], table.copies[rows], table.num_cached[rows] + 1.0, table.on_copy[rows])
        choice.even_out(seconds, speeds, mean)
        table.on_copy[rows] = choice.on_copy
        table.sort()

    def _lacking(self) -> Iterator[Sequence]:
        """Sequences that decode with a single copy, oldest first."""
        ids = self._residents.decoding
        return (ids[each] for each in sorted(ids) if len(ids[each].holders) == 1)

    def _evening(self) -> Move | None:
        """A second copy for an R-worker that joined, until it holds as much as the others."""
        table = self._residents.table
        self._joined = [each for each in self._joined if each in self._workers.accepting]
        if not self._joined or not len(table.rows):
            self._joined.clear()
            return None
        held = table.count_held(table.rows, table.num_cached[table.rows], len(self._workers))
        times = held / np.maximum(self._workers.speeds, 1e-300)
        target = self._joined[0]
        accepting = self._workers.accepting
        if times[target] >= UNEVEN_HOLDERS * times[accepting].mean():
            self._joined.pop(0)
            return None
        source = max(accepting, key=lambda worker: times[worker])
        for sequence in self._residents.on(source):
            free = sequence.sequence_id in self._residents.decoding and target not in sequence.holders
            if free and len(sequence.holders) == 2 and self._admission.has_room_for_copy(sequence, target):
                if sequence.worker == source:
                    self._residents.swap_home(sequence)
                return self._copy(sequence, target)
        self._joined.pop(0)
        return None

    def _copy(self, sequence: Sequence, target: int) -> Move:
        num_blocks = sequence.num_blocks
        self._residents.prefix_cache.make_room(target, num_blocks)
        return Move(
            sequence, sequence.num_cached, target, num_blocks, sequence.worker, sequence.cache_id, keeps_source=True
        )


class _Choice:
    """Rows that two R-workers hold, ``homes`` and ``copies``, int64 [n]; ``tokens``: float64 [n], what each attends;
    ``on_copy``: bool [n], where."""

    def __init__(self, homes: np.ndarray, copies: np.ndarray, tokens: np.ndarray, on_copy: np.ndarray) -> None:
        self._holders = np.column_stack([homes, copies])
        self._tokens = tokens
        self.on_copy = on_copy

    def even_out(self, seconds: np.ndarray, speeds: np.ndarray, mean: float) -> None:
        """Change ``on_copy`` until no R-worker of ``seconds``, float64 [num_workers], takes much above ``mean``, or
        nothing that is tried helps the busiest one. ``seconds`` follow; ``speeds``: tokens a second."""
        for _ in range(MOST_SWAPS + len(self._tokens) // 8):
            busiest = int(np.argmax(seconds))
            if seconds[busiest] <= EVEN * mean:
                return
            changed = self._best_change(busiest, seconds, speeds)
            if changed is None:
                return
            for row in changed:
                source, target = self._attending[row], self._others[row]
                seconds[source] -= self._tokens[row] / speeds[source]
                seconds[target] += self._tokens[row] / speeds[target]
                self.on_copy[row] = not self.on_copy[row]

    @property
    def _attending(self) -> np.ndarray:
        return self._holders[np.arange(len(self.on_copy)), self.on_copy.astype(np.int64)]

    @property
    def _others(self) -> np.ndarray:
        return self._holders[np.arange(len(self.on_copy)), 1 - self.on_copy.astype(np.int64)]

    def _best_change(self, busiest: int, seconds: np.ndarray, speeds: np.ndarray) -> tuple[int, ...] | None:
        """Of a row of the busiest R-worker that goes to its other holder, alone or with one from there that goes on to
        its own other holder, what leaves the least to the busiest of those it touches; None where nothing helps."""
        attending, others, tokens = self._attending, self._others, self._tokens
        mine = np.flatnonzero(attending == busiest)
        if not len(mine):
            return None
        via = others[mine]
        left = seconds[busiest] - tokens[mine] / speeds[busiest]
        there = seconds[via] + tokens[mine] / speeds[via]
        alone = np.maximum(left, there)
        best = int(np.argmin(alone))
        lowest = float(alone[best])
        found: tuple[int, ...] = (int(mine[best]),)
        onward = np.flatnonzero((attending != busiest) & np.isin(attending, via))
        if lowest >= seconds[busiest] and len(onward):
            to_busiest = others[onward] == busiest
            follows = attending[onward][None, :] == via[:, None]
            goes_down = there[:, None] - (tokens[onward] / speeds[attending[onward]])[None, :]
            own = left[:, None] + (to_busiest * tokens[onward] / speeds[busiest])[None, :]
            ends = np.where(to_busiest, 0.0, seconds[others[onward]] + tokens[onward] / speeds[others[onward]])
            most = np.where(follows, np.maximum(np.maximum(goes_down, own), ends[None, :]), np.inf)
            first, second = np.unravel_index(int(np.argmin(most)), most.shape)
            if most[first, second] < lowest:
                found, lowest = (int(mine[first]), int(onward[second])), float(most[first, second])
        return found if lowest < seconds[busiest] * (1 - 1e-9) else None
