"""Which sequence starts next, and where: seats, blocks, KV load, and the token budget that is left."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice

import numpy as np

from fastdecode.errors import RequestError
from fastdecode.scheduler.copy_placement import CopyPlacement
from fastdecode.scheduler.load_control import LoadControl
from fastdecode.scheduler.load_forecast import LoadForecast, Newcomer, placement_costs
from fastdecode.scheduler.output_lengths import SAMPLE, Outlook, OutputLengths
from fastdecode.scheduler.range_placement import RangePlacement
from fastdecode.scheduler.ranges import Range
from fastdecode.scheduler.residents import Residents
from fastdecode.scheduler.schedules import Limits, Schedule
from fastdecode.scheduler.sequence import Sequence
from fastdecode.scheduler.waiting import WaitingQueue
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
        self._copies = CopyPlacement(residents.workers, residents.table, limits.kv_replicas)
        self.num_starts = 0
        self.ranges = RangePlacement(
            residents.workers, residents.prefix_cache, residents.table.range_tokens, self._load_limits, self.forecast
        )

    def check(self, sequence: Sequence) -> None:
        """RequestError when ``sequence``, with its siblings, could never run."""
        members = 1 + len(sequence.siblings)
        if members > self._limits.max_num_seqs:
            raise RequestError(f"n is {members}, and max_num_seqs is {self._limits.max_num_seqs}")
        if sequence.max_cached > self.ranges.range_tokens:
            self.ranges.check(sequence)
        blocks = self._most_blocks(sequence)
        largest = max(worker.num_blocks for worker in self._workers)
        if blocks > largest:
            raise RequestError(
                f"the request's {members} sequences need {blocks} KV blocks, and the largest R-worker has {largest}: "
                f"lower n or max_tokens, or give more kv_cache_memory"
            )
        if self._schedule.stabilizes_load:
            self.load_control.check(self._longest(sequence))

    def fits_somewhere(self, sequence: Sequence) -> bool:
        """Whether some R-worker, or all of them, could still run ``sequence`` by itself."""
        return self._fits_among(sequence, self._workers.present)

    def fits_elsewhere(self, sequence: Sequence) -> bool:
        """Whether some R-worker that does not drain, or all of these, could run ``sequence`` by itself."""
        return self._fits_among(sequence, self._workers.accepting)

    def has_room_to_move(self, sequence: Sequence, moved: Range, index: int) -> bool:
        """Whether ``moved``, of ``sequence``, could go on on R-worker ``index`` without a preemption there."""
        if sequence.num_tokens > self.ranges.range_tokens:
            return self.ranges.has_room_to_move(sequence, moved, index)
        worker = self._workers[index]
        needed = self.blocks_for(sequence) + worker.num_sequences
        return self._could_hold(sequence, worker) and needed <= worker.available

    def copy_worker(self, sequence: Sequence) -> int:
        """Where the second copy of ``sequence``, which decodes and has one copy, can go now; -1: nowhere."""
        costs = self.forecast_anew().met_by(self._going_on(sequence)).means / np.maximum(self._workers.speeds, 1e-300)
        found = self._copies.choose(sequence.worker, self._could_hold_where(sequence), sequence.num_blocks + 1, costs)
        return -1 if found is None else found

    def has_room_for_copy(self, sequence: Sequence, index: int) -> bool:
        """Whether R-worker ``index`` could take a copy of ``sequence``, which decodes, without a preemption there."""
        worker = self._workers[index]
        needed = sequence.num_blocks + 1 + worker.num_sequences
        return self._could_hold(sequence, worker) and needed <= worker.available

    def blocks_to_move(self, sequence: Sequence, moved: Range) -> int:
        """Blocks that ``moved``, of ``sequence``, takes elsewhere, the one for the next token included."""
        in_ranges = sequence.num_tokens > self.ranges.range_tokens
        return self.ranges.blocks_to_move(moved) if in_ranges else self.blocks_for(sequence)

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
        if sequence.num_tokens > self.ranges.range_tokens:
            return self._start_in_ranges(sequence, hits, would_begin)
        costs = self._costs(sequence, alone, hits)
        for index in self._best_first(sequence, alone, hits, costs):
            hit = hits.get(index)
            there = self._newcomer(sequence, index, hit)
            if not self._has_room(sequence, self._workers[index], hit):
                continue
            if (copy := self._copy_beside(sequence, index, hit, costs)) is None:
                continue
            there = replace(there, copy=copy)
            if would_begin(there.num_left, there.num_prefill - there.num_left) and self._may_start(there):
                self._start(sequence, there, hit)
                return sequence
        return None

    def _copy_beside(
        self, sequence: Sequence, home: int, hit: tuple[int, Chain] | None, costs: np.ndarray
    ) -> int | None:
        """Where the second copy of ``sequence`` begins with it; -1: it gets none now, None: it has to wait for room.

        What goes on from a cached prefix begins with two copies where the prefix has two; else it gets its second one
        once it decodes.
        """
        if not self._copies.is_wanted:
            return -1
        if hit:
            twin = self._residents.prefix_cache.twin(hit)
            other = self._workers[twin[1].worker] if twin else None
            can_begin = other and not other.is_draining and self._has_room(sequence, other, twin)
            return other.index if other and can_begin else -1
        return self._copies.choose(home, self._could_hold_where(sequence), self.blocks_for(sequence), costs)

    def steps_left(self, rows: np.ndarray) -> np.ndarray:
        """Steps that each of these rows of the table is expected to decode yet: int64 [n]."""
        table, num_outputs = self._residents.table, self._residents.table.num_outputs(rows)
        return self.output_lengths.expected(num_outputs, table.max_tokens[rows]) - num_outputs

    def capacities(self) -> np.ndarray:
        """Tokens that the blocks of each R-worker hold: int64 [num_workers]."""
        return self._workers.num_blocks * self._workers.block_size

    def ceilings(self) -> np.ndarray:
        """KV tokens that each R-worker may come to attend, by its memory and a strict limit: float64 [num_workers]."""
        return np.minimum(self.capacities(), self._load_limits())

    def forecast_anew(self) -> LoadForecast:
        """The load of the coming steps as it is now, between two steps."""
        self._residents.table.refresh()
        self._forecast = None
        return self.forecast()

    def forecast(self) -> LoadForecast:
        """The load of the coming steps, made once a step, with all that started since."""
        if self._forecast is None:
            table, rows = self._residents.table, self._residents.table.rows
            left = self.steps_left(rows)
            self._forecast = LoadForecast(
                table.workers[rows],
                table.tail_lens(rows),
                left,
                len(self._workers),
                self._limits.max_num_batched_tokens,
                table.range_tokens,
                self._closed(left),
                table.copies[rows] if self._copies.is_wanted else None,
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

    def _closed(self, steps_left: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """R-workers and decode steps of all closed ranges of the sequences that decode, if there are any."""
        reads = self._residents.table.reads(self._residents.table.rows)
        return (reads["worker"], steps_left[reads["chunk"]]) if len(reads) else None

    def _in_prompt(self, sequence: Sequence) -> Newcomer:
        newcomer = self._newcomer_of(sequence, sequence.worker, sequence.attends_in_prompt)
        newcomer = replace(newcomer, copy=sequence.copy_worker)
        return self._in_ranges(newcomer, sequence.ranges) if sequence.is_sharded else newcomer

    def _in_ranges(self, newcomer: Newcomer, ranges: list[Range]) -> Newcomer:
        """``newcomer`` with all its ``ranges``; those that are lost have no load."""
        *others, last = ranges
        reads = tuple((each.worker, self.ranges.range_tokens) for each in others if each.worker >= 0)
        return replace(newcomer, worker=last.worker, base=last.start, reads=reads)

    def _start_in_ranges(
        self,
        sequence: Sequence,
        hits: dict[int, tuple[int, Chain]],
        would_begin: Callable[[int, int], int | bool],
    ) -> Sequence | None:
        """As ``start_next``, for a sequence of several ranges: after the longest prefix, or else after none."""
        longest = max(hits.values(), key=lambda hit: hit[0], default=None)
        for hit in dict.fromkeys((longest, None)):
            alone = self._newcomer(sequence, 0, hit)
            if not would_begin(alone.num_left, alone.num_prefill - alone.num_left):
                continue
            if (ranges := self.ranges.ranges(sequence, alone, hit)) is not None:
                self._begin(sequence, self._in_ranges(alone, ranges), ranges, hit)
                return sequence
        return None

    def next_tail(self, sequence: Sequence) -> tuple[int, bool]:
        """See ``RangePlacement.next_tail``; ``sequence`` decodes."""
        self.forecast_anew()
        return self.ranges.next_tail(sequence, self._going_on(sequence))

    def place_again(self, sequence: Sequence) -> bool:
        """Give ``sequence``, of which ranges were lost, places for them; False where there is no room."""
        self.forecast_anew()
        found = self.ranges.again(sequence, self._going_on(sequence))
        for lost, worker in found or ():
            self._residents.place(sequence, lost, worker)
        return found is not None

    def _going_on(self, sequence: Sequence) -> Newcomer:
        """``sequence`` for the steps that it has to go, from now on."""
        left = int(self.steps_left(np.array([sequence.row]))[0])
        return Newcomer(0, sequence.num_tokens - 1, 0, left)

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
        only = Range(sequence.sequence_id, newcomer.worker, 0, 0, self.blocks_for(sequence))
        self._begin(sequence, newcomer, [only], hit)

    def _begin(
        self, sequence: Sequence, newcomer: Newcomer, ranges: list[Range], hit: tuple[int, Chain] | None
    ) -> None:
        self._queue.pop()
        self.num_starts += sequence.outputs_at_start is None
        self._residents.start(sequence, ranges, hit, newcomer.copy)
        for worker in (*(each.worker for each in ranges), *newcomer.holders):
            self._available[worker] = self._workers[worker].available
        self.forecast().add(newcomer)
        if self._schedule.stabilizes_load:
            self.load_control.started(newcomer)

    def _costs(self, sequence: Sequence, newcomer: Newcomer, hits: dict[int, tuple[int, Chain]]) -> np.ndarray:
        """What ``sequence``, that is ``newcomer``, costs on each R-worker: float64 [num_workers]; infinite on those
        that drain if it could run elsewhere."""
        hit_tokens = {worker: hit[0] * self._workers.block_size for worker, hit in hits.items()}
        forecast = self.forecast()
        row_kv_tokens = self._row_kv_tokens(forecast)
        costs = placement_costs(forecast, newcomer, self._speeds, self._capacities, hit_tokens, row_kv_tokens)
        if (draining := self._workers.draining) and self.fits_elsewhere(sequence):
            costs[draining] = np.inf
        return costs

    def _best_first(
        self, sequence: Sequence, newcomer: Newcomer, hits: dict[int, tuple[int, Chain]], costs: np.ndarray
    ) -> Iterator[int]:
        """Where ``sequence`` may start, best first: by ``costs``, and only where these are finite.

        Among equals the one with most blocks available comes first. After the best only those that have room.
        """
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
        return not self._schedule.stabilizes_load or self.load_control.holds(worker.index, self._longest(sequence))

    def _could_hold_where(self, sequence: Sequence) -> np.ndarray:
        """The same of every R-worker: bool [num_workers]."""
        could = self._most_blocks(sequence) <= self._workers.num_blocks
        return could & (self._longest(sequence) <= self._load_limits())

    def _fits_among(self, sequence: Sequence, workers: list[int]) -> bool:
        if sequence.max_cached > self.ranges.range_tokens:
            return self.ranges.could_hold(sequence, workers)
        return any(self._could_hold(sequence, self._workers[index]) for index in workers)

    def _load_limits(self) -> np.ndarray:
        """KV tokens that each R-worker may attend, float64 [num_workers]; infinite unless the user limits them."""
        if self._schedule.stabilizes_load and self.load_control.is_strict:
            return self.load_control.limits
        return np.full(len(self._workers), np.inf)

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
        """Blocks that it takes at its start, with its siblings, or by itself at its end, whichever are more; of one
        that may have several ranges only those of the first."""
        if sequence.num_tokens > self.ranges.range_tokens:
            return 0
        most = min(sequence.max_cached, self.ranges.range_tokens)
        return max(self.blocks_for(sequence), self._workers.blocks_for(most))

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

    def _longest(self, sequence: Sequence) -> int:
        """The most tokens that ``sequence`` and its siblings can attend in one step on one R-worker that they need."""
        return min(sequence.max_cached, self.ranges.range_tokens) * (1 + len(sequence.siblings))
