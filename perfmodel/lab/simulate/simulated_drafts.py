"""Simulates draft tokens of speculative decoding: their acceptance and their cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fastdecode.core.step import ScheduledStep
from fastdecode.cycle import Companion, Cycle
from fastdecode.perfmodel.lab.draft_times import Drafting
from fastdecode.perfmodel.lab.simulate.tokens import Clock


class SimulatedDrafter:
    """Proposes draft tokens for the scheduler, and decides at random how many of them are accepted."""

    def __init__(self, drafting: Drafting, num_r_workers: int) -> None:
        self.drafting = drafting
        self._num_r_workers = num_r_workers
        self._rng = np.random.default_rng(0)

    def propose(self, wanted: Mapping[int, int]) -> dict[int, list[int]]:
        """Return the wanted number of tokens for each sequence; their values have no effect."""
        return {each: [0] * count for each, count in wanted.items()}

    def seconds(self, wanted: Mapping[int, int], kv_tokens: float) -> float:
        """Return the seconds of drafting for sequences with ``kv_tokens`` cached tokens in all."""
        passes = max(wanted.values(), default=0)
        return self.drafting.cost.seconds(len(wanted), passes, kv_tokens, self._num_r_workers) if passes else 0.0

    def accepted(self, drafts: Mapping[int, Sequence[int]]) -> dict[int, int]:
        """Draw how many of each sequence's draft tokens are accepted; return the numbers by sequence id."""
        if not drafts:
            return {}
        counts = np.array([len(tokens) for tokens in drafts.values()])
        draws = self._rng.random((len(drafts), int(counts.max()))) < self.drafting.acceptance_rate
        runs = np.minimum(np.cumprod(draws, axis=1).sum(axis=1), counts)
        return dict(zip(drafts, runs.tolist(), strict=True))

    def kv_loads(self, step: ScheduledStep) -> list[float]:
        """Return the cached tokens that each R-worker attends in ``step``.

        Rows of drafts read the same tokens as their sequence's first row, so they add only ``row_share`` of these.
        """
        loads = np.array(step.kv_loads, np.float64)
        for mini_batch in step.mini_batches if step.drafts else ():
            chunks = mini_batch.chunks
            more = (chunks["num_rows"] - 1) * chunks["is_decode"] * chunks["context_len"]
            loads += self.drafting.row_share * np.bincount(chunks["worker"], more, len(loads))
        return loads.tolist()


class SimulatedSpeculation(Companion):
    """Drafts before each step, and lets the time of drafting pass."""

    def __init__(self, drafter: SimulatedDrafter, clock: Clock) -> None:
        self._drafter, self._clock = drafter, clock

    def prepare(self, cycle: Cycle) -> None:
        """Draft as ``Speculation`` does for a live engine."""
        scheduler = cycle.scheduler
        wanted = scheduler.drafts.grant()
        if not wanted:
            return
        scheduler.drafts.propose(self._drafter.propose(wanted))
        decoding = scheduler.store.residents.decoding
        kv_tokens = sum(decoding[sequence_id].num_cached for sequence_id in wanted)
        seconds = self._drafter.seconds(wanted, kv_tokens)
        if policy := scheduler.drafts.policy:
            policy.observe_drafting(len(wanted), max(wanted.values()), seconds)
        self._clock.work(seconds)
