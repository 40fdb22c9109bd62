"""Prefill workers for the product's own cycle: they store prompts on naive R-workers some turns later, or fail."""

from __future__ import annotations

import random

from fastdecode.core.remote_prefill import PrefillPart, RemotePrefill
from fastdecode.core.step import ScheduledStep
from fastdecode.cycle import Companion, Cycle
from helpers.naive_workers import NaiveWorkers

MOST_TURNS = 6
FAILS = 0.15
"""Of the prompts that could be stored, this part fails all the same: a prefill worker was lost."""

MISSES = 0.05
"""Of the places that stand, this part cannot be reached all the same."""


class SomePrompts:
    """``PrefillPolicy``: prefill workers get about two of three prompts, of at least two tokens, in one part or two."""

    def __init__(self) -> None:
        self.under_way: set[int] = set()
        self._turn = 0

    def begin_step(self, now_seconds: float, num_waiting: int = 0, num_decoding: int = 0) -> None:
        """See ``PrefillPolicy``."""
        self._turn = num_waiting + num_decoding

    def assign(self, num_tokens: int, context_len: int = 0) -> tuple[PrefillPart, ...]:
        """See ``PrefillPolicy``; the answer to one question is the same all through a step."""
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
    """``num_stored``: prompts that were stored; ``num_spread``: of these, those at more than one place."""

    def __init__(self, naive: NaiveWorkers, seed: int) -> None:
        self._naive, self._rng = naive, random.Random(seed)
        self._jobs: list[tuple[int, RemotePrefill]] = []
        self.num_stored = self.num_spread = 0

    def begun(self, step: ScheduledStep) -> None:
        """The R-workers have reserved blocks."""
        self._jobs += [(self._rng.randint(1, MOST_TURNS), prefill) for prefill in step.prefills]

    def before(self, cycle: Cycle) -> None:
        """Store what is due, in any order, unless it is not wanted any more."""
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
