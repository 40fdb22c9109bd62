"""The engine's prompts at prefill workers: handed out after a plan, taken back once computed, given up if lost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from fastdecode.core.protocols import PrefillBackend
from fastdecode.core.remote_prefill import Prefilled, RemotePrefill
from fastdecode.core.types import RWorkerInfo
from fastdecode.scheduler import Scheduler

logger = logging.getLogger(__name__)


class RemotePrefills:
    """What the engine does for prefill workers between steps; the scheduler decides which prompts are theirs.

    ``on_prefilled`` is called with each prompt that was computed; ``method`` may change between prompts.
    """

    def __init__(
        self, backend: PrefillBackend, scheduler: Scheduler, r_workers: Sequence[RWorkerInfo], method: str
    ) -> None:
        """``method``: how prefill workers share a prompt, one of ``PREFILL_METHODS``."""
        self._backend, self._scheduler, self._r_workers, self.method = backend, scheduler, r_workers, method
        self._logits: dict[int, np.ndarray] = {}
        self.on_prefilled: Callable[[Prefilled], None] = lambda prefilled: None

    @property
    def num_under_way(self) -> int:
        """Prompts that are being computed."""
        return len(self._backend.jobs)

    def update(self) -> None:
        """To be called before every step: tell the scheduler what has become of its prompts."""
        now = time.perf_counter()
        prompts = self._scheduler.remote_prompts
        outcomes = self._backend.outcomes()
        for each in outcomes.computed:
            if self._scheduler.prefilled(each.job_id, now):
                self._logits[each.sequence_id] = each.logits
                self.on_prefilled(each)
        for worker in outcomes.joined:
            logger.info("prefill worker %d has joined", worker)
            if prompts.policy:
                prompts.policy.joined(worker)
        for worker in outcomes.lost:
            logger.warning("prefill worker %d is lost: what it computed is computed again", worker)
            if prompts.policy:
                prompts.policy.lost(worker)
        for job_id in outcomes.failed:
            self._scheduler.prefill_failed(job_id, now)
        self.cancel_unwanted()

    def cancel_unwanted(self) -> None:
        """Have prefill workers give up prompts that the scheduler does not wait for any more, within a layer."""
        for job_id in self._backend.jobs:
            if job_id not in self._scheduler.remote_prompts:
                self._backend.cancel(job_id)

    def hand_out(self, prefills: Sequence[RemotePrefill]) -> None:
        """The R-workers have reserved blocks for these."""
        for each in prefills:
            method = "kvr" if each.context_len else self.method  # those that gather all have no way to a prefix
            self._backend.submit(replace(each, method=method), self._r_workers)

    def logits(self, sequence_ids: Sequence[int]) -> dict[int, np.ndarray]:
        """Of prompts that have arrived; all others that were kept are dropped."""
        found = {sequence_id: self._logits[sequence_id] for sequence_id in sequence_ids}
        self._logits.clear()
        return found

    def wait(self, timeout_seconds: float) -> None:
        """Until something has become of a prompt."""
        self._backend.wait(timeout_seconds)
