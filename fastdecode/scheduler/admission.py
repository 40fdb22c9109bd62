"""Which sequence starts next, and where: seats, blocks, KV load, and the token budget that is left."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import numpy as np

from fastdecode.errors import RequestError
from fastdecode.scheduler.load_control import LoadControl
from fastdecode.scheduler.load_forecast import LoadForecast, Newcomer, placement_costs
from fastdecode.scheduler.output_lengths import SAMPLE, Outlook, OutputLengths
from fastdecode.scheduler.residents import Residents, WaitingQueue
from fastdecode.scheduler.schedules import Limits, Schedule
from fastdecode.scheduler.sequence import Sequence
from fastdecode.scheduler.worker_state import Chain, WorkerState


class Admission:
    """Lets the head of the queue start where every budget allows it; no sequence overtakes the head."""

    def __init__(self, schedule: Schedule, limits: Limits, residents: Residents, queue: WaitingQueue) -> None:
        self.load_control = LoadControl(limits.kv_load_limit, residents.workers, limits.micro_batch_interval)
        self.output_lengths = OutputLengths()
        self._schedule = schedule
        self._limits = limits
        self._residents = residents
        self._workers = residents.workers
        self._queue = queue
        self._forecast: LoadForecast | None = None
        self._available = self._capacities = np.zeros(0, np.int64)
        self._speeds, self._num_present = np.zeros(0), 1
        self._is_open = True
        self.num_starts = 0

    def check(self, sequence: Sequence) -> None:
        """RequestError when ``sequence``, with its siblings, could never run."""
        members = 1 + len(sequence.siblings)
        if members > self._limits.max_num_seqs:
            raise RequestError(f"n is {members}, and max_num_seqs is {self._limits.max_num_seqs}")
        blocks = self._most_blocks(sequence)
        largest = max(worker.num_blocks for worker in self._workers)
        if blocks > largest:
            raise RequestError(
                f"the request's {members} sequences need {blocks} KV blocks, and the largest R-worker has {largest}: "
                f"lower n or max_tokens, or give more kv_cache_memory"
            )
        if self._schedule.stabilizes_load:
            self.load_control.check(_longest(sequence))

    def fits_somewhere(self, sequence: Sequence) -> bool:
        """Whether some R-worker could still run ``sequence`` by itself."""
        return any(self._could_hold(sequence, worker) for worker in self._workers if not worker.is_gone)

    def fits_elsewhere(self, sequence: Sequence) -> bool:
        """Whether some R-worker that does not drain could run ``sequence`` by itself."""
        return any(self._could_hold(sequence, self._workers[index]) for index in self._workers.accepting)

    def has_room_to_move(self, sequence: Sequence, index: int) -> bool:
        """Whether ``sequence``, as it is now, could go on on R-worker ``index`` without a preemption there."""
        worker = self._workers[index]
        needed = self.blocks_for(sequence) + worker.num_sequences
        return self._could_hold(sequence, worker) and needed <= worker.available

    def blocks_for(self, sequence: Sequence) -> int:
        """Blocks that ``sequence`` holds from its start, its siblings' copies of a partial block included."""
        siblings = len(sequence.siblings)
        if self._schedule.reserves_longest:
            return self._workers.blocks_for(self._limits.max_model_len) * (1 + siblings)
        num_tokens = sequence.num_tokens
        return self._workers.blocks_for(num_tokens) + siblings * (num_tokens % self._workers.block_size > 0)

    def begin_step(self) -> None:
        """The running sequences of this step are known: what was derived from them is derived anew."""
        self._forecast = None
        self.num_starts = 0
        self._is_open = not self._schedule.waves or not len(self._residents)
        if not len(self._queue):
            return
        self._available = self._workers.available
        self._capacities = self.capacities()
        self._speeds, self._num_present = self._workers.speeds, max(1, len(self._workers.present))
        self.output_lengths.running(self._residents.table.num_outputs(self._residents.table.rows))
        if self._schedule.stabilizes_load:
            seats = max(1, self._limits.max_num_seqs - len(self._residents))
            head = next(iter(self._queue), None)
            self.load_control.begin_step(
                lambda: [self._newcomer(sequence) for sequence in islice(self._queue, seats)],
                None if head is None else self._newcomer(head),
                len(self._queue) <= seats,
                not len(self._residents),
                self.forecast,
                None if head is None or (head.may_stop and not self.output_lengths.is_known) else self._outlook,
            )

    def start_next(self, would_begin: Callable[[int, int], int | bool]) -> Sequence | None:
        """Start the head of the queue and return it; None when it has to wait.

        ``would_begin``: whether this step would compute some of so many prompt tokens after a cached prefix of so many,
        or prefill workers would.
        """
        sequence = self._queue.head()
        if sequence is None or not self._is_open or not self._has_seats(sequence):
            return None
        alone = self._newcomer(sequence)
        if self._schedule.stabilizes_load and not self.load_control.affords(alone):
            return None
        hits = self._residents.prefix_cache.hits(sequence)
        if not hits and not would_begin(alone.num_left, 0):
            return None
        for index in self._best_first(sequence, alone, hits):
            hit = hits.get(index)
            there = self._newcomer(sequence, index, hit)
            has_room = self._has_room(sequence, self._workers[index], hit)
            if has_room and would_begin(there.num_left, there.num_prefill - there.num_left) and self._may_start(there):
                self._start(sequence, there, hit)
                return sequence
        return None

    def steps_left(self, rows: np.ndarray) -> np.ndarray:
        """Steps that each of these rows of the table is expected to decode yet: int64 [n]."""
        table, num_outputs = self._residents.table, self._residents.table.num_outputs(rows)
        return self.output_lengths.expected(num_outputs, table.max_tokens[rows]) - num_outputs

    def capacities(self) -> np.ndarray:
        """Tokens that the blocks of each R-worker hold: int64 [num_workers]."""
        return self._workers.num_blocks * self._workers.block_size

    def ceilings(self) -> np.ndarray:
        """KV tokens that each R-worker may come to attend, by its memory and a strict limit: float64 [num_workers]."""
        control = self.load_control
        is_limited = self._schedule.stabilizes_load and control.is_strict
        return np.minimum(self.capacities(), control.limits if is_limited else np.inf)

    def forecast_anew(self) -> LoadForecast:
        """The load of the coming steps as it is now, between two steps."""
        self._residents.table.refresh()
        self._forecast = None
        return self.forecast()

    def forecast(self) -> LoadForecast:
        """The load of the coming steps, made once a step, with all that started since."""
        if self._forecast is None:
            table, rows = self._residents.table, self._residents.table.rows
            self._forecast = LoadForecast(
                table.workers[rows],
                table.num_cached[rows],
                self.steps_left(rows),
                len(self._workers),
                self._limits.max_num_batched_tokens,
            )
            for sequence in self._residents.prompts.values():
                self._forecast.add(self._in_prompt(sequence))
        return self._forecast

    def _outlook(self) -> Outlook:
        """The rest of the run, as far as those that wait by now go."""
        weight = 1
        while len(self._queue) > weight * SAMPLE:
            weight *= 2
        waiting = [member for each in islice(self._queue, 0, None, weight) for member in (each, *each.siblings)]
        table, prompts = self._residents.table, self._residents.prompts.values()
        num_outputs = table.num_outputs(table.rows)
        ends = self.output_lengths.drawn(num_outputs, table.max_tokens[table.rows]) - num_outputs
        return Outlook(
            loads=self.forecast().loads.sum(axis=0),
            ends=np.append(ends, self._drawn_steps(prompts)),
            num_prefill=np.array([each.num_prefill or len(each.prompt_token_ids) for each in waiting]),
            decode_steps=self._drawn_steps(waiting),
            weight=weight,
            seats=self._limits.max_num_seqs,
            limit=float(self.load_control.limit or 0),
            idle_share=self._limits.idle_s_share,
        )

    def _drawn_steps(self, sequences: Iterable[Sequence]) -> np.ndarray:
        """Decode steps that these, none of which decodes yet, may take; int64 [n]."""
        listed = list(sequences)
        outputs = np.array([len(each.output_token_ids) for each in listed], np.int64)
        most = np.array([each.max_tokens for each in listed], np.int64)
        return np.maximum(self.output_lengths.drawn(outputs, most) - outputs - 1, 0)

    def _in_prompt(self, sequence: Sequence) -> Newcomer:
        return self._newcomer_of(sequence, sequence.worker, sequence.attends_in_prompt)

    def _able(self, sequence: Sequence, newcomer: Newcomer) -> np.ndarray:
        """R-workers that have room and load to spare for ``sequence``, that is ``newcomer``: bool [num_workers].

        What the loop over R-workers asks of one, of hundreds at once, when the best of them cannot.
        """
        spare = 0 if self._schedule.reserves_longest else self._workers.num_sequences
        able = self.blocks_for(sequence) + spare <= self._available
        able &= self._most_blocks(sequence) <= self._workers.num_blocks
        if self._schedule.stabilizes_load:
            able &= self.load_control.fits_where(newcomer, self.forecast)
        return able

    def _may_start(self, newcomer: Newcomer) -> bool:
        if not self._schedule.stabilizes_load:
            return True
        return self.load_control.fits(newcomer, self.forecast)

    def _start(self, sequence: Sequence, newcomer: Newcomer, hit: tuple[int, Chain] | None) -> None:
        self._queue.pop()
        self.num_starts += sequence.outputs_at_start is None
        self._residents.start(sequence, newcomer.worker, hit, self.blocks_for(sequence))
        self._available[newcomer.worker] = self._workers[newcomer.worker].available
        self.forecast().add(newcomer)
        if self._schedule.stabilizes_load:
            self.load_control.started(newcomer)

    def _best_first(self, sequence: Sequence, newcomer: Newcomer, hits: dict[int, tuple[int, Chain]]) -> Iterator[int]:
        """Where ``sequence`` may start, best first; on R-workers that drain only if it could never run elsewhere.

        Among equals the one with most blocks available comes first. After the best only those that have room.
        """
        hit_tokens = {worker: hit[0] * self._workers.block_size for worker, hit in hits.items()}
        forecast = self.forecast()
        row_kv_tokens = self._row_kv_tokens(forecast)
        costs = placement_costs(forecast, newcomer, self._speeds, self._capacities, hit_tokens, row_kv_tokens)
        if (draining := self._workers.draining) and self.fits_elsewhere(sequence):
            costs[draining] = np.inf
        best = np.flatnonzero(costs == costs.min())
        yield int(best[np.argmax(self._available[best])])  # nearly always it is that one
        able = self._able(sequence, newcomer)
        able[list(hits)] = True
        order = np.lexsort((-self._available, costs))
        yield from order[(able & np.isfinite(costs))[order]].tolist()

    def _row_kv_tokens(self, forecast: LoadForecast) -> float:
        """KV tokens that an R-worker of mean speed attends while the S-worker computes a row.

        Where neither was measured yet, as if both sides were as busy now, which is what R-workers are bought for.
        """
        limit = self.load_control.limit
        if limit is not None:
            return limit / self._limits.max_num_seqs / self._num_present
        return float(forecast.loads[:, 0].sum()) / max(1, len(self._residents)) / self._num_present

    def _has_seats(self, sequence: Sequence) -> bool:
        return len(self._residents) + 1 + len(sequence.siblings) <= self._limits.max_num_seqs

    def _could_hold(self, sequence: Sequence, worker: WorkerState) -> bool:
        """Whether ``sequence`` could run to its end on ``worker``, were it alone there."""
        if self._most_blocks(sequence) > worker.num_blocks:
            return False
        return not self._schedule.stabilizes_load or self.load_control.holds(worker.index, _longest(sequence))

    def _has_room(self, sequence: Sequence, worker: WorkerState, hit: tuple[int, Chain] | None) -> bool:
        """Its blocks, and one more for each sequence there already, so that none is preempted at once."""
        if not self._could_hold(sequence, worker):
            return False
        taken_over = hit[1].blocks[: hit[0]] if hit else []
        needed = self.blocks_for(sequence) - len(taken_over)
        needed += sum(block.num_sequences == 0 for block in taken_over)  # no longer there for the asking
        spare = 0 if self._schedule.reserves_longest else worker.num_sequences
        return needed + spare <= worker.available

    def _most_blocks(self, sequence: Sequence) -> int:
        """Blocks that it takes at its start, with its siblings, or by itself at its end, whichever are more."""
        return max(self.blocks_for(sequence), self._workers.blocks_for(sequence.max_cached))

    def _newcomer(self, sequence: Sequence, worker: int = 0, hit: tuple[int, Chain] | None = None) -> Newcomer:
        """``sequence`` as it would start."""
        attends = hit is not None or sequence.num_prefill > self._residents.scratch_free
        taken_over = hit[0] * self._workers.block_size if hit else 0
        return self._newcomer_of(sequence, worker, attends, taken_over)

    def _newcomer_of(self, sequence: Sequence, worker: int, attends: bool, taken_over: int = 0) -> Newcomer:
        outputs, expected = len(sequence.output_token_ids), sequence.max_tokens
        if self.output_lengths.is_known:
            expected = int(self.output_lengths.expected(np.array([outputs]), np.array([expected]))[0])
        return Newcomer(
            worker=worker,
            num_prefill=sequence.num_prefill,
            num_left=sequence.num_prefill - max(sequence.num_cached, taken_over),
            decode_steps=expected - outputs - 1,
            num_siblings=len(sequence.siblings),
            attends=attends,
            expected_area=self.output_lengths.expected_area(sequence.num_prefill, outputs, sequence.max_tokens)
            if sequence.may_stop
            else None,
        )


def _longest(sequence: Sequence) -> int:
    """The most tokens that ``sequence`` and its siblings can attend in one step."""
    return sequence.max_cached * (1 + len(sequence.siblings))
