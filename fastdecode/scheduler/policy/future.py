"""The expected future of running and waiting sequences: their output lengths, and the KV load that follows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice

import numpy as np

from fastdecode.scheduler.places.place import Segment
from fastdecode.scheduler.policy.load_forecast import LoadForecast, Newcomer
from fastdecode.scheduler.policy.output_lengths import SAMPLE, Outlook, OutputLengths
from fastdecode.scheduler.schedules import Limits
from fastdecode.scheduler.sequence import TokenSequence
from fastdecode.scheduler.store.store import Store
from fastdecode.scheduler.waiting import WaitingQueue


class Future:
    """Provides the load forecast of a step.
    The forecast is made when it is first used in a step; sequences that start later in the step are added to it.
    """

    def __init__(self, limits: Limits, store: Store, queue: WaitingQueue) -> None:
        self.output_lengths = OutputLengths()
        self._limits, self._queue = limits, queue
        self._workers, self._table, self._residents = store.workers, store.table, store.residents
        self._forecast: LoadForecast | None = None

    def begin_step(self) -> None:
        """Drop the last step's forecast. Call this once the sequences that run in the new step are known."""
        self._forecast = None

    def learn_lengths(self) -> None:
        """Update the length estimate with the output lengths of running sequences, which are lower bounds."""
        self.output_lengths.running(self._table.num_outputs(self._table.rows))

    def forecast(self) -> LoadForecast:
        """Return the forecast of the coming steps' load, made once per step. Later starts in the step are added."""
        if self._forecast is None:
            table, rows = self._table, self._table.rows
            left = self.steps_left(rows)
            self._forecast = LoadForecast(
                table.homes[rows],
                table.tail_lens(rows),
                left,
                len(self._workers),
                self._limits.max_num_batched_tokens,
                table.segment_tokens,
                self._closed(left),
                table.second_workers[rows] if self._limits.placing.twice else None,
            )
            for sequence in self._residents.prompts.values():
                self._forecast.add(self._in_prompt(sequence))
        return self._forecast

    def forecast_anew(self) -> LoadForecast:
        """Make and return a new forecast of the coming steps' load. The table must be up to date."""
        self._forecast = None
        return self.forecast()

    def steps_left(self, rows: np.ndarray) -> np.ndarray:
        """Return how many more steps the sequences in these table ``rows`` are expected to decode: int64 [n]."""
        num_outputs = self._table.num_outputs(rows)
        return self.output_lengths.expected(num_outputs, self._table.max_tokens[rows]) - num_outputs

    def going_on(self, sequence: TokenSequence) -> Newcomer:
        """Return the load of the running ``sequence`` in its remaining steps, in the form of a new sequence's."""
        # counts the whole output; fewer tokens are cached if segments were lost
        outputs = len(sequence.output_token_ids)
        expected = int(self.output_lengths.expected(np.array([outputs]), np.array([sequence.max_tokens]))[0])
        return Newcomer(0, sequence.num_tokens - 1, 0, expected - outputs)

    def newcomer(self, sequence: TokenSequence, worker: int = 0, taken_over: int = -1) -> Newcomer:
        """Return the load that ``sequence`` adds if it starts on R-worker ``worker``.
        ``taken_over``: tokens of the cached prefix that it uses; -1 for none.
        """
        attends = taken_over >= 0 or sequence.num_prefill > self._residents.scratch_free
        return self._newcomer(sequence, worker, attends, max(taken_over, 0))

    def in_segments(self, newcomer: Newcomer, segments: list[Segment]) -> Newcomer:
        """Return ``newcomer`` with its load divided among the R-workers of ``segments``; lost segments add no load."""
        *others, last = segments
        reads = tuple((each.home, self._table.segment_tokens) for each in others if each.home >= 0)
        return replace(newcomer, worker=last.home, base=last.start, reads=reads)

    def outlook(self, load_limit: int) -> Outlook:
        """Return the expected rest of the run, for all running and waiting requests.
        ``load_limit``: KV tokens per step.
        """
        weight = 1
        while len(self._queue) > weight * SAMPLE:
            weight *= 2
        waiting = [member for each in islice(self._queue, 0, None, weight) for member in (each, *each.siblings)]
        table, prompts = self._table, self._residents.prompts.values()
        num_outputs = table.num_outputs(table.rows)
        ends = self.output_lengths.drawn(num_outputs, table.max_tokens[table.rows]) - num_outputs
        return Outlook(
            loads=self.forecast().loads.sum(axis=0),
            ends=np.append(ends, self._drawn_steps(prompts)),
            num_prefill=np.array([each.num_prefill or len(each.prompt_token_ids) for each in waiting]),
            decode_steps=self._drawn_steps(waiting),
            weight=weight,
            seats=self._limits.max_num_seqs,
            limit=float(load_limit),
            idle_share=self._limits.idle_s_share,
        )

    def _drawn_steps(self, sequences: Iterable[TokenSequence]) -> np.ndarray:
        """Return plausible numbers of decode steps of ``sequences``, which do not decode yet; int64 [n]."""
        listed = list(sequences)
        outputs = np.array([len(each.output_token_ids) for each in listed], np.int64)
        most = np.array([each.max_tokens for each in listed], np.int64)
        return np.maximum(self.output_lengths.drawn(outputs, most) - outputs - 1, 0)

    def _closed(self, steps_left: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Return two arrays for the full segments of decoding sequences: their R-workers, and remaining decode steps.
        Return None if there are none.
        """
        reads = self._table.reads(self._table.rows)
        return (reads["worker"], steps_left[reads["chunk"]]) if len(reads) else None

    def _in_prompt(self, sequence: TokenSequence) -> Newcomer:
        newcomer = self._newcomer(sequence, sequence.worker, sequence.attends_in_prompt)
        if sequence.has_several:
            return self.in_segments(newcomer, sequence.segments)
        return replace(newcomer, copy=int(self._table.second_workers[sequence.row]))

    def _newcomer(self, sequence: TokenSequence, worker: int, attends: bool, taken_over: int = 0) -> Newcomer:
        outputs, expected = len(sequence.output_token_ids), sequence.max_tokens
        if self.output_lengths.is_known:
            expected = int(self.output_lengths.expected(np.array([outputs]), np.array([expected]))[0])
        area = None
        if sequence.may_stop:
            area = self.output_lengths.expected_area(sequence.num_prefill, outputs, sequence.max_tokens)
        return Newcomer(
            worker=worker,
            num_prefill=sequence.num_prefill,
            num_left=sequence.num_prefill - max(sequence.num_cached, taken_over),
            decode_steps=expected - outputs - 1,
            num_siblings=len(sequence.siblings),
            attends=attends,
            expected_area=area,
        )
