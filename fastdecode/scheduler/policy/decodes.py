"""The decodes of a step: which sequences decode, which blocks they get, and which copy of a segment is attended."""

from __future__ import annotations

import numpy as np

from fastdecode.scheduler.places.place import Segment
from fastdecode.scheduler.policy.admission import Admission
from fastdecode.scheduler.policy.second_copies import SecondCopies
from fastdecode.scheduler.schedules import Limits
from fastdecode.scheduler.sequence import TokenSequence
from fastdecode.scheduler.store.operations import Attend, Decision, Extend, Grow, MakeRoom, Preempt, Refresh
from fastdecode.scheduler.store.store import Store


class Decodes:
    """Lets all sequences decode in every step, unless they would exceed a strict load limit or blocks run out."""

    def __init__(self, store: Store, admission: Admission, limits: Limits, copies: SecondCopies | None) -> None:
        """``copies``: second copies of sequences, if there are any; then every step chooses the copies to attend."""
        self._store, self._table, self._workers = store, store.table, store.workers
        self._admission, self._load_limit = admission, admission.load_limit
        self._attendance = Attendance(store) if limits.placing.twice else None
        self._copies = copies

    def choose(self) -> Decision[np.ndarray]:
        """Return the table rows that decode in this step, int64 [n], and reserve blocks for their next tokens."""
        table = self._table
        while True:
            yield Refresh()
            if self._attendance and (change := self._attendance.choose()):
                yield change
            rows = self._within_load_limit()
            tail_lens, room = table.tail_lens(rows), table.tail_room(rows)
            if (room <= 0).any():
                yield from self._extend(rows[room <= 0])
                continue
            held = self._workers.sizes.blocks_of_tokens(table.num_blocks[rows])
            growing = rows[tail_lens // self._workers.block_size >= held]
            if not len(growing):
                return rows
            needed = table.count_held(growing, 1, len(self._workers)).tolist()
            short = []
            for worker, count in enumerate(needed):
                if self._workers[worker].free < count and not (yield MakeRoom(worker, count)):
                    short.append(worker)
            if not short:
                yield Grow(growing)
                return rows
            yield from self._make_way(short[0])

    def _extend(self, rows: np.ndarray) -> Decision[None]:
        """Give the sequence of ``rows[0]``, whose last segment is full, a new segment.
        If no R-worker has a free block for it, preempt a sequence.
        """
        sequence = self._table.sequence(int(rows[0]))
        worker, has_room = self._admission.segments.next_tail(sequence)
        if has_room:
            yield Extend(sequence, worker)
        elif worker >= 0:
            yield from self._make_way(worker)
        else:
            yield Preempt(sequence)

    def _make_way(self, worker: int) -> Decision[None]:
        """Free blocks on R-worker ``worker``: drop a sequence's second copy there, else preempt a sequence."""
        if self._copies is None or not (yield from self._copies.give_up(worker)):
            yield Preempt(self._victim(worker))

    def _victim(self, worker: int) -> TokenSequence:
        """Return the youngest sequence on R-worker ``worker``, to be preempted.
        Sequences that got no token since their last preemption are spared, unless only they and the oldest sequence are
        there.
        """
        here = self._store.residents.on(worker)
        for sequence in reversed(here[1:]):
            stuck = sequence.was_preempted and len(sequence.output_token_ids) == sequence.outputs_at_start
            if not stuck:
                return sequence
        return here[-1]

    def _within_load_limit(self) -> np.ndarray:
        """Return the rows that may decode: a strict load limit excludes the youngest sequences that would exceed it.
        This happens when outputs are longer than expected.
        """
        table, limits = self._table, self._load_limit.strict
        rows = table.rows
        if limits is None:
            return rows
        limits = limits - self._store.residents.prompt_loads(len(limits))
        for worker in np.flatnonzero(table.kv_loads(len(limits)) > limits):
            loads = table.loads_on(int(worker), rows)
            here, loads = rows[loads > 0], loads[loads > 0]
            by_age = np.argsort(table.chunks["sequence_id"][here])
            beyond = np.cumsum(loads[by_age]) > limits[worker]
            rows = rows[~np.isin(rows, here[by_age[beyond]])]
        return rows


class Attendance:
    """Balances the load of R-workers in each step without moving data: either copy of a segment can be attended."""

    def __init__(self, store: Store) -> None:
        self._store, self._table, self._workers = store, store.table, store.workers

    def choose(self) -> Attend | None:
        """Return which copy of each segment of the decoding sequences to attend in this step.
        The choice balances the busy time of all R-workers. Return None if no segment has two copies.
        """
        table = self._table
        rows, closed = table.rows[table.second_workers[table.rows] >= 0], self._closed()
        if not len(rows) and not closed:
            return None
        speeds = self._workers.speeds.latest(self._workers.present)
        seconds = table.kv_loads(len(self._workers)) / speeds
        present = np.array(self._workers.present)
        mean = float((seconds[present] * speeds[present]).sum() / speeds[present].sum())
        holders = np.array([segment.workers for _, segment in closed], np.int64).reshape(-1, 2)
        choice = _Choice(
            np.append(table.homes[rows], holders[:, 0]),
            np.append(table.second_workers[rows], holders[:, 1]),
            np.append(table.tail_lens(rows) + 1.0, np.full(len(closed), float(table.segment_tokens))),
            np.append(table.on_second[rows], np.zeros(len(closed), bool)),
        )
        choice.even_out(seconds, speeds, mean)
        swapped = [closed[place] for place in np.flatnonzero(choice.on_second[len(rows) :]).tolist()]
        return Attend(rows, choice.on_second[: len(rows)], swapped)

    def _closed(self) -> list[tuple[TokenSequence, Segment]]:
        decoding = self._store.residents.decoding
        several = [each for each in self._table.several() if each.sequence_id in decoding]
        return [(each, segment) for each in several for segment in each.closed if segment.twice]


class _Choice:
    """Chooses, for each of n segments with two copies, the R-worker that attends.
    ``homes`` and ``others``, int64 [n]: the R-workers with the copies. ``tokens``, float64 [n]: KV tokens of each
    segment. ``on_second``, bool [n]: the choice; True for ``others``.
    """

    def __init__(self, homes: np.ndarray, others: np.ndarray, tokens: np.ndarray, on_second: np.ndarray) -> None:
        self._holders = np.column_stack([homes, others])
        self._tokens = tokens
        self.on_second = on_second

    def even_out(self, seconds: np.ndarray, speeds: np.ndarray, mean: float) -> None:
        """Change ``on_second`` until no R-worker takes much longer than ``mean`` seconds, or no change helps.
        ``seconds``, float64 [num_workers]: each R-worker's busy time, updated here. ``speeds``: KV tokens per second.
        """
        # Up to this multiple of the mean, the busiest R-worker's time needs no change
        even = 1.002
        # Most segments that change their R-worker in one step; the next step changes more
        most_swaps = 64
        for _ in range(most_swaps + len(self._tokens) // 8):
            busiest = int(np.argmax(seconds))
            if seconds[busiest] <= even * mean:
                return
            changed = self._best_change(busiest, seconds, speeds)
            if changed is None:
                return
            for row in changed:
                source, target = self._attending[row], self._others[row]
                seconds[source] -= self._tokens[row] / speeds[source]
                seconds[target] += self._tokens[row] / speeds[target]
                self.on_second[row] = not self.on_second[row]

    @property
    def _attending(self) -> np.ndarray:
        return self._holders[np.arange(len(self.on_second)), self.on_second.astype(np.int64)]

    @property
    def _others(self) -> np.ndarray:
        return self._holders[np.arange(len(self.on_second)), 1 - self.on_second.astype(np.int64)]

    def _best_change(self, busiest: int, seconds: np.ndarray, speeds: np.ndarray) -> tuple[int, ...] | None:
        """Return which one or two segments to switch so as to relieve R-worker ``busiest`` most; None if nothing helps.
        The first segment is then attended by its other R-worker instead of ``busiest``. If that R-worker would then be
        too busy, a second segment is switched from there to its own other R-worker.
        """
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
