"""Second copies (``kv_replicas``): who attends in each step, and which copy is made next."""

from __future__ import annotations

import numpy as np

from fastdecode.scheduler.admission import Admission
from fastdecode.scheduler.migration import Move
from fastdecode.scheduler.recent_speeds import RecentSpeeds
from fastdecode.scheduler.residents import Residents
from fastdecode.scheduler.sequence import Sequence

SHARE = 0.1
"""Of the steps' time, what making second copies may take: decodes wait meanwhile."""

LEAST_SECONDS = 0.01
"""A piece of a copy may take so long though steps are short: each has fixed costs."""

MOST_BLOCKS = 1 << 20
"""Of a piece."""

KEPT = 0.8
"""What of the time that pieces took counts after another one."""

EVEN = 1.002
"""The busiest R-worker's time over the mean, from which on nothing is swapped."""

MOST_SWAPS = 64
"""In one step; what is uneven beyond them is evened in the next."""

MOST_TRIED = 4
"""Sequences that are looked at before the next step; there may be room for none of thousands."""

UNEVEN_HOLDERS = 0.9
"""An R-worker that holds less than this part of the mean, by its speed, is given second copies of others."""


class Copies:
    """Every sequence that two R-workers hold may attend on either, so the load is evened anew in each step without a
    move; and a lost R-worker's sequences go on from their other copies.

    A prompt is stored on both R-workers while it is computed, unless it goes on from a prefix that only one has. What
    has a single copy gets its second one between steps, one after another, in pieces that take a small part of a step.
    """

    def __init__(self, residents: Residents, admission: Admission, seconds_per_copied_token: float) -> None:
        """``seconds_per_copied_token``: before any was copied."""
        self._residents, self._admission = residents, admission
        self._workers = residents.workers
        self._seconds_per_token = seconds_per_copied_token
        self._copied = np.zeros(2)
        self._credit = self._step_seconds = 0.0
        self._joined: list[int] = []
        self._has_lost = False
        self.speeds = RecentSpeeds(residents.workers)

    def lost(self) -> None:
        """An R-worker is gone: those whose tokens of this step are missing get them first, however long it took."""
        self._has_lost = True

    def observe(self, step_seconds: float) -> None:
        """A step took so long: a part of that may go to copies."""
        if self._has_lost:
            self._credit, self._has_lost = min(self._credit, 0.0), False
            return
        self._step_seconds = step_seconds
        self._credit = min(self._credit, 0.0) + SHARE * step_seconds

    def made(self, move: Move, seconds: float) -> None:
        """The piece is there, after ``seconds``."""
        if copying := self._residents.copying:
            self._residents.extend_copy(*copying, move.num_tokens)
        self._copied = KEPT * self._copied + (move.num_tokens, seconds)
        self._credit -= seconds

    def joined(self, worker: int) -> None:
        """R-worker ``worker`` holds nothing yet."""
        self._joined.append(worker)
        self.speeds.forget(worker)

    def leave_draining(self) -> None:
        """What R-workers that drain hold, and others too, is theirs no more."""
        for worker in self._workers.draining:
            self.give_up(worker)
            for sequence in self._residents.on(worker):
                if len(sequence.holders) > 1:
                    self._residents.drop_holder(sequence, worker)

    def give_up(self, worker: int) -> bool:
        """Give up the copy that is being made on ``worker``; False where none is."""
        copying = self._residents.copying
        if copying is None or copying[1].worker != worker:
            return False
        self._residents.drop_copying()
        return True

    def next(self) -> Move | None:
        """The next piece of a second copy, if there is one to make and the time for it."""
        if self._credit <= 0:
            return None
        if self._residents.copying is None and (found := self._lacking() or self._evening()):
            self._residents.begin_copy(*found)
        if self._residents.copying is None:
            return None
        sequence, held = self._residents.copying
        if not self._residents.grow_copy(sequence, held):
            self._residents.drop_copying()
            return None
        left, most = sequence.num_cached - held.num_tokens, self._piece_tokens()
        count = left if left <= most else most
        return Move(sequence, count, held.worker, 0, sequence.worker, held.cache_id, True, held.num_tokens)

    def _piece_tokens(self) -> int:
        """Tokens that are copied in a part of a step's time, in whole blocks."""
        per_token = self._copied[1] / self._copied[0] if self._copied[0] else self._seconds_per_token
        seconds, block_size = max(SHARE * self._step_seconds, LEAST_SECONDS), self._workers.block_size
        num_blocks = seconds / max(per_token * block_size, 1e-9)
        return max(1, int(min(num_blocks, MOST_BLOCKS))) * block_size

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

    def _lacking(self) -> tuple[Sequence, int] | None:
        """The oldest sequence that decodes with a single copy, of those for whose second there is room, and where."""
        table = self._residents.table
        table.refresh()
        ids = table.chunks["sequence_id"][table.rows[table.copies[table.rows] < 0]]
        for sequence_id in np.sort(ids)[:MOST_TRIED].tolist():
            sequence = self._residents.decoding[sequence_id]
            if (target := self._admission.copy_worker(sequence)) >= 0:
                return sequence, target
        return None

    def _evening(self) -> tuple[Sequence, int] | None:
        """A sequence for an R-worker that joined, until it holds as much as the others."""
        while self._joined:
            if found := self._for_newcomer(self._joined[0]):
                return found, self._joined[0]
            self._joined.pop(0)
        return None

    def _for_newcomer(self, target: int) -> Sequence | None:
        """A sequence with two copies, one of them on the R-worker that holds most: that one ``target`` is to have."""
        table, accepting = self._residents.table, self._workers.accepting
        if target not in accepting:
            return None
        held = table.count_held(table.rows, table.num_cached[table.rows], len(self._workers))
        times = held / np.maximum(self._workers.speeds, 1e-300)
        if times[target] >= UNEVEN_HOLDERS * times[accepting].mean():
            return None
        source = max(accepting, key=lambda worker: times[worker])
        for sequence in self._residents.on(source):
            decodes = sequence.sequence_id in self._residents.decoding
            may_go = decodes and len(sequence.holders) == 2 and target not in sequence.holders
            if may_go and self._admission.has_room_for_copy(sequence, target):
                if sequence.worker == source:
                    self._residents.swap_home(sequence)
                return sequence
        return None


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
