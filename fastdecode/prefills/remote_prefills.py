"""The engine's side of prompts at prefill workers: sending them, receiving their results, handling failures."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from fastdecode.core.protocols import PrefillBackend
from fastdecode.core.remote_prefill import Prefilled
from fastdecode.core.step import ScheduledStep
from fastdecode.core.types import RWorkerInfo, StepReport
from fastdecode.cycle import Companion, Cycle
from fastdecode.scheduler import Scheduler

logger = logging.getLogger(__name__)


class RemotePrefills(Companion):
    """The companion that exchanges prompts with prefill workers. The scheduler decides which prompts they compute.
    ``on_prefilled``: called with each computed prompt. ``method``: how prefill workers share a prompt, one of
    ``PREFILL_METHODS``; it may change between prompts.
    """

    def __init__(self, backend: PrefillBackend, r_workers: Sequence[RWorkerInfo], method: str) -> None:
        self.backend, self._r_workers, self.method = backend, r_workers, method
        self._logits: dict[int, np.ndarray] = {}
        self.on_prefilled: Callable[[Prefilled], None] = lambda prefilled: None

    def before(self, cycle: Cycle) -> None:
        """Report computed and failed prompts, and joined and lost prefill workers, to the scheduler."""
        scheduler, now = cycle.scheduler, cycle.world.now()
        policy = scheduler.remote_prompts.policy
        outcomes = self.backend.outcomes()
        for each in outcomes.computed:
            if scheduler.prefilled(each.job_id, now, each.missed):
                self._logits[each.sequence_id] = each.logits
                self.on_prefilled(each)
        for worker in outcomes.joined:
            logger.info("prefill worker %d has joined", worker)
            if policy:
                policy.joined(worker)
        for worker in outcomes.lost:
            logger.warning("prefill worker %d is lost: its prompts are computed again", worker)
            if policy:
                policy.lost(worker)
        for job_id in outcomes.failed:
            scheduler.prefill_failed(job_id, now)
        self.cancel_unwanted(scheduler)

    def begun(self, step: ScheduledStep) -> None:
        """Send the prompts of this step to prefill workers; R-workers have reserved blocks for these prompts."""
        for each in step.prefills:
            # prefill workers cannot read a cached prefix by the method "tsp"
            method = "kvr" if each.context_len else self.method
            self.backend.submit(replace(each, method=method), self._r_workers)

    def cancel_unwanted(self, scheduler: Scheduler) -> None:
        """Cancel prompts that ``scheduler`` no longer waits for; prefill workers stop after the current layer."""
        for job_id in self.backend.jobs:
            if scheduler.remote_prompts.end_if_left(job_id):
                self.backend.cancel(job_id)

    def ended(self, cycle: Cycle, report: StepReport) -> None:
        """Drop the logits of computed prompts, since this step has sampled from them."""
        self._logits.clear()

    def logits(self, sequence_ids: Sequence[int]) -> dict[int, np.ndarray]:
        """Return the last token's logits of computed prompts by sequence id: [vocab_size], in the model's dtype."""
        return {sequence_id: self._logits[sequence_id] for sequence_id in sequence_ids}

    def wait(self, timeout_seconds: float) -> None:
        """Wait until a prompt is computed or fails, at most ``timeout_seconds``."""
        self.backend.wait(timeout_seconds)
