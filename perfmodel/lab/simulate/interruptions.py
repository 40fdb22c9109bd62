"""The cost of lost R-workers for their sequences: recomputed tokens, and pauses."""

from __future__ import annotations

import numpy as np

from fastdecode.core.step import ScheduledStep
from fastdecode.cycle import Companion
from fastdecode.perfmodel.lab.simulate.simulated_requests import SimulatedRequests
from fastdecode.perfmodel.lab.simulate.tokens import Clock
from fastdecode.scheduler import Scheduler


class Interruptions(Companion):
    """Observes each sequence that lost tokens, and counts the recomputed rows.

    ``num_recomputed``: tokens that were cached and are recomputed because of lost R-workers.
    """

    def __init__(self, scheduler: Scheduler, requests: SimulatedRequests, clock: Clock) -> None:
        self.num_recomputed = 0
        self._residents, self._requests, self._clock = scheduler.store.residents, requests, clock
        self._had: dict[int, int] = {}
        self._moments: list[tuple[int, float]] = []

    def forget(self, sequence_id: int) -> None:
        """Record how many tokens a sequence had, and when, as its R-worker is lost.
        Ignore a sequence that has ended.
        """
        sequence = self._requests[sequence_id]
        if sequence not in self._residents:
            self._had.pop(sequence_id, None)
            return
        self._had[sequence_id] = max(sequence.num_cached, self._had.get(sequence_id, 0))
        self._moments.append((sequence_id, self._clock.now_seconds))

    def begun(self, step: ScheduledStep) -> None:
        """Count the rows of ``step`` that recompute lost tokens."""
        if not self._had:
            return
        for mini_batch in step.mini_batches:
            chunks = mini_batch.chunks
            here = chunks.take(np.flatnonzero(np.isin(chunks["sequence_id"], list(self._had))))
            starts = here["context_len"].tolist()
            ends = (here["context_len"] + here["num_rows"]).tolist()
            for sequence_id, start, end in zip(here["sequence_id"].tolist(), starts, ends, strict=True):
                self._compute(sequence_id, start, end)
        for prefill in step.prefills:
            if prefill.sequence_id in self._had:
                self._compute(prefill.sequence_id, prefill.parts[0].start, prefill.parts[-1].end)

    def _compute(self, sequence_id: int, start: int, end: int) -> None:
        had = self._had[sequence_id]
        self.num_recomputed += max(0, min(end, had) - start)
        if end >= had:
            del self._had[sequence_id]

    def pauses(self) -> np.ndarray:
        """Return the pauses of decoding sequences by lost R-workers: float64 [n], in seconds.

        A pause lasts from a sequence's last token before a loss to its next token. Several losses in it count once.
        """
        found = {}
        for sequence_id, moment in self._moments:
            seconds = self._requests.token_seconds(sequence_id)
            place = int(np.searchsorted(seconds, moment, side="left"))
            if 0 < place < len(seconds):
                found[sequence_id, place] = seconds[place] - seconds[place - 1]
        return np.array(list(found.values()))
