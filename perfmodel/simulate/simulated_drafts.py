"""Drafts in simulated time: how many of them are accepted, and what they cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fastdecode.core.step import ScheduledStep
from fastdecode.cycle import Companion, Cycle
from fastdecode.perfmodel.draft_times import Drafting
from fastdecode.perfmodel.simulate.tokens import Clock


class SimulatedDrafter:
    """Proposes what the scheduler wants, and draws how much of it is accepted.

    Each sequence's acceptance is drawn once, from a beta distribution with the mean of ``drafting`` and standard
    deviation ``spread``. Nothing is proposed for one in 1 - ``found`` of all wants, as where n-grams find nothing.
    """

    def __init__(
        self, drafting: Drafting, num_r_workers: int, spread: float = 0.0, found: float = 1.0, seed: int = 0
    ) -> None:
        self.drafting = drafting
        self._num_r_workers = num_r_workers
        self._spread, self._found = spread, found
        self._rng = np.random.default_rng(seed)
        self._acceptance: dict[int, float] = {}

    def propose(self, wanted: Mapping[int, int]) -> dict[int, list[int]]:
        """So many tokens for each sequence, or none; which ones has no effect."""
        found = self._rng.random(len(wanted)) < self._found
        return {each: [0] * count for (each, count), is_found in zip(wanted.items(), found, strict=True) if is_found}

    def seconds(self, wanted: Mapping[int, int], kv_tokens: float) -> float:
        """Return the seconds of drafting for sequences with ``kv_tokens`` in all."""
        passes = max(wanted.values(), default=0)
        return self.drafting.cost.seconds(len(wanted), passes, kv_tokens, self._num_r_workers) if passes else 0.0

    def accepted(self, drafts: Mapping[int, Sequence[int]]) -> dict[int, int]:
        """How many draft tokens of each sequence are accepted."""
        if not drafts:
            return {}
        rates = np.array([self._rate(sequence_id) for sequence_id in drafts])
        counts = np.array([len(tokens) for tokens in drafts.values()])
        draws = self._rng.random((len(drafts), int(counts.max()))) < rates[:, None]
        runs = np.minimum(np.cumprod(draws, axis=1).sum(axis=1), counts)
        return dict(zip(drafts, runs.tolist(), strict=True))

    def kv_loads(self, step: ScheduledStep) -> list[float]:
        """Cached tokens that each R-worker attends in ``step``; further rows over the same reading count as the part of
        it that they take."""
        loads = np.array(step.kv_loads, np.float64)
        for mini_batch in step.mini_batches if step.drafts else ():
            chunks = mini_batch.chunks
            more = (chunks["num_rows"] - 1) * chunks["is_decode"] * chunks["context_len"]
            loads += self.drafting.row_share * np.bincount(chunks["worker"], more, len(loads))
        return loads.tolist()

    def _rate(self, sequence_id: int) -> float:
        mean, spread = self.drafting.acceptance_rate, self._spread
        if not spread or not 0 < mean < 1:
            return mean
        if sequence_id not in self._acceptance:
            weight = max(mean * (1 - mean) / spread**2 - 1, 1e-3)
            self._acceptance[sequence_id] = float(self._rng.beta(mean * weight, (1 - mean) * weight))
        return self._acceptance[sequence_id]


class SimulatedSpeculation(Companion):
    """Before each step: asks the scheduler for whom to draft, and lets the time of drafting pass."""

    def __init__(self, drafter: SimulatedDrafter, clock: Clock) -> None:
        self._drafter, self._clock = drafter, clock

    def prepare(self, cycle: Cycle) -> None:
        """Draft as ``Speculation`` does for a live engine."""
        scheduler = cycle.scheduler
        wanted = scheduler.drafts.wanted()
        if not wanted:
            return
        scheduler.drafts.propose(self._drafter.propose(wanted))
        decoding = scheduler.store.residents.decoding
        kv_tokens = sum(decoding[sequence_id].num_cached for sequence_id in wanted)
        seconds = self._drafter.seconds(wanted, kv_tokens)
        if policy := scheduler.drafts.policy:
            policy.observe_drafting(len(wanted), max(wanted.values()), seconds)
        self._clock.work(seconds)
