"""Prefill workers for the product's own cycle: some turns later, they store prompts on naive R-workers, or fail."""

from __future__ import annotations

import random

from fastdecode.core.remote_prefill import PrefillPart, RemotePrefill
from fastdecode.core.step import ScheduledStep
from fastdecode.cycle import Companion, Cycle
from helpers.naive_workers import NaiveWorkers

MOST_TURNS = 6
FAILS = 0.15
"""Probability that a prompt fails although it could be stored, as if a prefill worker were lost."""

MISSES = 0.05
"""Probability that a present R-worker cannot be reached."""


class SomePrompts:
    """A ``PrefillPolicy`` that sends two of three prompts of at least two tokens away, in one or two parts."""

    def __init__(self) -> None:
        self.under_way: set[int] = set()
        self._turn = 0

    def begin_step(self, now_seconds: float, num_waiting: int = 0, num_decoding: int = 0) -> None:
        """See ``PrefillPolicy``."""
        self._turn = num_waiting + num_decoding

    def assign(self, num_tokens: int, context_len: int = 0) -> tuple[PrefillPart, ...]:
        """See ``PrefillPolicy``. Within a step, the answer to the same question is the same."""
        if num_tokens < 2 or (num_tokens + context_len + self._turn) % 3 == 0:
            return ()
        middle, end = context_len + num_tokens // 2, context_len + num_tokens
        if num_tokens % 2:
            return (PrefillPart(0, context_len, end),)
        return (PrefillPart(0, context_len, middle), PrefillPart(1, middle, end))

    def started(self, job_id: int, parts: tuple[PrefillPart, ...]) -> None:
        """See ``PrefillPolicy``."""
        self.under_way.add(job_id)

    def ended(self, job_id: int, now_seconds: float, computed: bool = False) -> None:
        """See ``PrefillPolicy``."""
        self.under_way.remove(job_id)

    def joined(self, worker: int) -> None:
        """See ``PrefillPolicy``."""

    def lost(self, worker: int) -> None:
        """See ``PrefillPolicy``."""


class NaivePrefills(Companion):
    """``num_stored``: stored prompts. ``num_spread``: prompts among these that are at several places."""

    def __init__(self, naive: NaiveWorkers, seed: int) -> None:
        self._naive, self._rng = naive, random.Random(seed)
        self._jobs: list[tuple[int, RemotePrefill]] = []
        self.num_stored = self.num_spread = 0

    def begun(self, step: ScheduledStep) -> None:
        """Note that the R-workers have reserved blocks."""
        self._jobs += [(self._rng.randint(1, MOST_TURNS), prefill) for prefill in step.prefills]

    def before(self, cycle: Cycle) -> None:
        """Store the prompts that are due, in any order, unless they are no longer wanted."""
        has_left = cycle.scheduler.remote_prompts.end_if_left
        self._jobs = [(turns - 1, each) for turns, each in self._jobs if not has_left(each.job_id)]
        due = [each for turns, each in self._jobs if turns <= 0]
        self._jobs = [(turns, each) for turns, each in self._jobs if turns > 0]
        self._rng.shuffle(due)
        for prefill in due:
            missed = self._naive.store(prefill, lambda: self._rng.random() < MISSES)
            if missed is None or self._rng.random() < FAILS:
                cycle.scheduler.prefill_failed(prefill.job_id, cycle.world.now())
            elif cycle.scheduler.prefilled(prefill.job_id, cycle.world.now(), missed):
                self.num_stored += 1
                self.num_spread += len(prefill.stores) > 1
            else:
                assert missed
