"""Times prompts on prefill workers, cut into given parts, for calibration and ``bench prefill``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fastdecode.api.config import EngineConfig
from fastdecode.api.outputs import RequestMetrics
from fastdecode.api.sampling_params import SamplingParams
from fastdecode.core.errors import BackendError
from fastdecode.core.remote_prefill import Prefilled, PrefillPart
from fastdecode.engine.engine import LLMEngine


@dataclass(frozen=True)
class PromptRun:
    """Seconds from a prompt's arrival to its first token, and bytes of K and V sent to prefill workers and R-worker."""

    seconds: float
    sent_bytes: int
    stored_bytes: int


class PrefillRunner(Protocol):
    """The interface to time prompts on prefill workers, which are numbered from 0."""

    num_workers: int

    def run(self, jobs: Sequence[Sequence[PrefillPart]], method: str = "kvr") -> list[PromptRun]:
        """Return runs of prompts that arrive together, cut as ``jobs`` says. ``method``: one of PREFILL_METHODS."""


def in_order(parts: Sequence[int], first_worker: int = 0) -> tuple[PrefillPart, ...]:
    """Assign ``parts``, in tokens, to consecutive workers from ``first_worker`` on; leave out parts of 0 tokens."""
    ends = list(itertools.accumulate(parts))
    return tuple(
        PrefillPart(first_worker + index, end - rows, end)
        for index, (rows, end) in enumerate(zip(parts, ends, strict=True))
        if rows
    )


class GivenParts:
    """A ``PrefillPolicy`` that cuts prompts as given, in order."""

    def __init__(self) -> None:
        self.parts: list[tuple[PrefillPart, ...]] = []
        self.lost_workers: list[int] = []

    def begin_step(self, now_seconds: float, num_waiting: int = 0, num_decoding: int = 0) -> None:
        """Do nothing, since nothing depends on the time."""

    def assign(self, num_tokens: int, context_len: int = 0) -> tuple[PrefillPart, ...]:
        """Return the given parts of the next prompt."""
        bounds = (context_len, context_len + num_tokens)
        return self.parts[0] if self.parts and (self.parts[0][0].start, self.parts[0][-1].end) == bounds else ()

    def started(self, job_id: int, parts: tuple[PrefillPart, ...]) -> None:
        """Advance to the given parts of the next prompt."""
        self.parts.pop(0)

    def ended(self, job_id: int, now_seconds: float, computed: bool = False) -> None:
        """Do nothing."""

    def joined(self, worker: int) -> None:
        """Do nothing: a worker gets parts only as given."""

    def lost(self, worker: int) -> None:
        """Do nothing: the measurement fails anyway."""
        self.lost_workers.append(worker)


class LivePrefill:
    """A real engine with the prefill workers of ``config.prefill_workers``; it must be closed.

    It runs prompts of random tokens, which end with their first output token, so that nothing else decodes.
    """

    def __init__(self, config: EngineConfig, seed: int = 0) -> None:
        self.engine = LLMEngine(config)
        self._policy = GivenParts()
        self._rng = np.random.default_rng(seed)
        self._request_ids = (f"prefill-{number}" for number in itertools.count())
        spec = config.prefill_worker_spec
        self.num_workers = spec.count if spec else 0
        self.engine.scheduler.remote_prompts.policy = self._policy
        warm_up_tokens = 64
        for worker in range(self.num_workers):
            self.run([in_order((warm_up_tokens,), worker)])

    def run(self, jobs: Sequence[Sequence[PrefillPart]], method: str = "kvr") -> list[PromptRun]:
        """Return runs of prompts that arrive together, cut as ``jobs`` says."""
        engine = self.engine
        if engine.prefills is None:
            raise BackendError("the engine has no prefill workers to compute prompts on")
        finished: dict[int, Prefilled] = {}
        engine.prefills.method = method
        engine.prefills.on_prefilled = lambda prefilled: finished.update({prefilled.sequence_id: prefilled})
        self._policy.parts = [tuple(parts) for parts in jobs]
        ids = [next(self._request_ids) for _ in jobs]
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
        for request_id, parts in zip(ids, jobs, strict=True):
            tokens = self._rng.integers(0, engine.s_model.vocab_size, parts[-1].end).tolist()
            engine.add_request(request_id, {"prompt_token_ids": tokens}, params)
        outputs: dict[str, RequestMetrics] = {}
        while engine.has_unfinished_requests():
            outputs |= {output.request_id: output.metrics for output in engine.step() if output.finished}
        if len(finished) != len(jobs) or self._policy.lost_workers:
            raise BackendError("a prefill worker was lost while prompts were measured on it")
        counts = [finished[sequence_id] for sequence_id in sorted(finished)]
        times = [outputs[request_id] for request_id in ids]
        return [
            PromptRun(time.token_seconds[0] - time.arrival_seconds, count.sent_bytes, count.stored_bytes)
            for time, count in zip(times, counts, strict=True)
        ]

    def close(self) -> None:
        """Free the engine and its workers."""
        self.engine.close()
