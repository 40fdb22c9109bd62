"""The ``World`` and the ``Requests`` of a real engine: its S-worker, R-workers and clock, and its requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from fastdecode.api.outputs import RequestOutput
from fastdecode.api.request import Completion, InFlight, Request
from fastdecode.core.metrics import HOST, Pool, StateClock, StepRecord, Tracer, step_record
from fastdecode.core.protocols import AttentionBackend, RanksBackend
from fastdecode.core.step import ScheduledStep
from fastdecode.core.types import RWorkerInfo, StepReport
from fastdecode.cycle import JoinedWorker, RunningCycle
from fastdecode.engine.sources import AttentionSources, Sampled
from fastdecode.journal.journal import Journal
from fastdecode.scheduler import TokenSequence, Transfer
from fastdecode.sworker import SWorker
from fastdecode.sworker.sampling import SampledToken
from fastdecode.sworker.sampling.prompt_scores import ScoredPrompt
from fastdecode.sworker.sampling.sampler import num_accepted

logger = logging.getLogger(__name__)


class LiveRequests:
    """The requests of an engine. ``in_flight``: unfinished requests; ``journal``: records their tokens."""

    def __init__(
        self, in_flight: InFlight, eos_token_ids: frozenset[int], clock: StateClock, journal: Journal | None = None
    ) -> None:
        self.in_flight = in_flight
        self.journal = journal or Journal()
        self._eos_token_ids = eos_token_ids
        self._clock = clock
        self._grown: dict[str, Request] = {}
        self._ended: list[Request] = []

    def __len__(self) -> int:
        """Return the number of requests in flight, and of ended ones not yet returned."""
        return len(self.in_flight) + len(self._ended)

    def enter(self, request: Request) -> None:
        """Add ``request`` to the requests in flight. Some of its samples may have ended in an earlier engine."""
        self.journal.enter(request)
        self.in_flight.add(request)
        for completion in request.completions:
            if completion.finish_reason is not None:
                self.in_flight.end(completion)
        if request.finished:
            self._ended.append(request)
            self.in_flight.remove(request.request_id)

    def begun(self, step: ScheduledStep, now_seconds: float) -> None:
        """Record that requests whose prompt begins in ``step`` stop waiting at ``now_seconds``. See ``Requests``."""
        if not step.num_starts:
            return
        here = [int(chunk["sequence_id"]) for part in step.mini_batches for chunk in part.prompts]
        for sequence_id in (*here, *(each.sequence_id for each in step.prefills)):
            request, _ = self.in_flight.family(sequence_id)
            request.started_seconds = request.started_seconds or now_seconds

    def accepted(self, step: ScheduledStep, computed: Sampled) -> dict[int, int]:
        return {each: num_accepted(computed[each], tokens) for each, tokens in step.drafts.items()}

    def take(self, cycle: RunningCycle, computed: Sampled, accepted: Mapping[int, int], spoilt: Collection[int]) -> int:
        now = self._clock.enter(HOST)
        grown: dict[str, Request] = {}
        num_tokens = 0
        for sequence_id, tokens in computed.items():
            if sequence_id in spoilt:
                continue
            request, completions = self.in_flight.family(sequence_id)
            grown[request.request_id] = request
            if sequence_id in accepted:
                num_tokens += self._grow(cycle, request, completions[0], tokens[: 1 + accepted[sequence_id]])
                continue
            if len(completions) > 1:
                cycle.scheduler.store.fork_siblings(completions[0].sequence)
            for completion, token in zip(completions, tokens, strict=True):
                num_tokens += self._grow(cycle, request, completion, (token,))
        for request in grown.values():
            request.token_seconds.append(now)
            if request.finished:
                self.in_flight.remove(request.request_id)
        self._grown |= grown
        if self.journal.records:
            self.journal.grew(grown.values(), cycle.scheduler.store.take_notes())
        return num_tokens

    def give_up(self, cycle: RunningCycle, sequence: TokenSequence) -> None:
        request, completions = self.in_flight.family(sequence.sequence_id)
        for completion in completions:
            completion.stop_reason = "no remaining R-worker has room for it"
            self._finish(cycle, completion, "error")
        logger.error("request %s: no remaining R-worker has room for it", request.request_id)
        self.journal.grew([request])
        if request.finished:
            self._ended.append(request)
            self.in_flight.remove(request.request_id)

    def abort(self, cycle: RunningCycle, request_id: str) -> None:
        """Abort the waiting or running request ``request_id``; unknown ids are ignored."""
        self._ended = [each for each in self._ended if each.request_id != request_id]
        request = self.in_flight.remove(request_id)
        if request:
            self.journal.dropped(request)
        for completion in request.completions if request else ():
            if completion.finish_reason is None:
                self._finish(cycle, completion, "abort")

    def take_outputs(self) -> list[RequestOutput]:
        """Return the outputs of the requests that got tokens or ended since the last call.
        The outputs are made while the journal is being written.
        """
        outputs = [request.output() for request in (*self._grown.values(), *self._ended)]
        self._grown.clear()
        self._ended.clear()
        if self.journal.records:
            self.journal.settle()
        return outputs

    def _grow(
        self, cycle: RunningCycle, request: Request, completion: Completion, tokens: Sequence[SampledToken]
    ) -> int:
        """Append ``tokens`` to ``completion`` until one ends it; return how many were appended."""
        for count, token in enumerate(tokens, 1):
            completion.append(token, request.params, self._eos_token_ids)
            if token.failed and not token.excluded:
                cycle.scheduler.store.prefixes.forget_path(completion.sequence)
            if completion.finish_reason is not None:
                self._finish(cycle, completion, completion.finish_reason)
                return count
        return len(tokens)

    def _finish(self, cycle: RunningCycle, completion: Completion, reason: str) -> None:
        completion.finish_reason = reason
        self.in_flight.end(completion)
        cycle.finish(completion.sequence, reason)


class LiveWorld:
    """The ``World`` of an engine.
    ``overlap``: mini-batches alternate, so that S-worker and R-workers compute at once; set it to False only to measure
    what overlapping saves. ``tracer``: records the busy intervals of S-worker and R-workers; None without a trace.
    ``clock`` keeps intervals only if there is a tracer.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        s_worker: SWorker,
        r_workers: list[RWorkerInfo],
        in_flight: InFlight,
        prefills: Any = None,
        ranks: RanksBackend | None = None,
        in_ranges: bool = False,
    ) -> None:
        """R-workers that join are appended to ``r_workers``.
        ``prefills``: the ``RemotePrefills``, or None. ``ranks``: the same as ``backend`` if several ranks share the
        model. ``in_ranges``: a sequence may be split into ranges on several R-workers.
        """
        self.backend, self.s_worker, self.r_workers = backend, s_worker, r_workers
        self.clock: StateClock = s_worker.clock
        self.tracer: Tracer | None = None
        self.overlap = True
        self.sources = AttentionSources(s_worker.layout, in_flight, backend, in_ranges, prefills is not None)
        self._in_flight = in_flight
        self._prefills = prefills
        self.ranks = ranks

    def now(self) -> float:
        return time.perf_counter()

    def tell(self, step: ScheduledStep) -> None:
        self.backend.begin_step(step.to_step_plan())

    def compute(self, step: ScheduledStep) -> Sampled:
        """Return the sampled tokens of ``step``, and of the prompts that prefill workers have finished."""
        if self._in_flight.asking:
            step = self.sources.tapped(step)
        sampled = [sequence_id for mini_batch in step.mini_batches for sequence_id in mini_batch.sampled_ids]
        arrived = self._prefills.logits(step.arrived) if self._prefills else {}
        sampling = {each: self._in_flight.sampling_rows(each, step.drafts.get(each)) for each in (*sampled, *arrived)}
        requests = {each: self._in_flight.family(each)[0] for each in step.scored_prompts}
        scored = {each: ScoredPrompt(it.prompt_token_ids, it.num_prompt_top) for each, it in requests.items()}
        tokens = self.s_worker.run(step, sampling, self.overlap, arrived, scored)
        for sequence_id, found in self.s_worker.prompt_scores.items():
            requests[sequence_id].take_prompt_scores(found)
        return self.sources.found(step, tokens, self.s_worker.taps) if step.taps else tokens

    def score(self, step: ScheduledStep) -> np.ndarray:
        """Return the log-probability of each next token in the one scored chunk of ``step``: float32 [num_tokens - 1].
        The R-workers keep no tokens of the chunk.
        """
        self.tell(step)
        try:
            return self.s_worker.score(step).numpy()
        finally:
            self.abandon_step()

    def end_step(self) -> StepReport:
        return self.backend.end_step()

    def abandon_step(self) -> None:
        self.backend.abandon_step()

    def wait(self) -> None:
        """Wait until a prompt at the prefill workers is computed or fails, or for a short time."""
        # The wait is short, since the caller can add requests only after it
        patience_seconds = 0.05
        if self._prefills:
            self._prefills.wait(patience_seconds)

    def transfer(self, transfer: Transfer) -> float:
        start, first, count = time.perf_counter(), transfer.num_copied, transfer.num_tokens
        data = self.backend.export(transfer.source, transfer.cache_id, first, count)
        self.backend.import_(transfer.target, transfer.cache_id, count, data, first)
        return time.perf_counter() - start

    def admit(self, vacant: Sequence[int]) -> dict[int, JoinedWorker]:
        """See ``World``. The bandwidth of a new R-worker is set only if every R-worker has measured its own."""
        joined = self.backend.admit(vacant)
        return {index: self._enter(index, info) for index, info in joined.items()}

    def dismiss(self, worker: int) -> None:
        self.backend.dismiss(worker)

    def forget(self, sequence_id: int) -> None:
        if self.ranks and self.s_worker.prompts.sequence_ids:
            self.ranks.forget(sequence_id)
        self.s_worker.forget(sequence_id)

    def record(self, step: ScheduledStep, report: StepReport, num_output_tokens: int, pool: Pool) -> StepRecord:
        """See ``World``; this also starts the clock of the next step."""
        seconds = self.clock.snapshot()
        self.clock.restart()
        if self.tracer:
            self.tracer.add(self.clock.intervals, report)
            self.clock.intervals.clear()
        return step_record(step, report, seconds, num_output_tokens, self.overlap, pool)

    def start_tracing(self) -> Tracer:
        """Start to record the busy intervals of S-worker and R-workers; return the tracer."""
        self.tracer = self.tracer or Tracer()
        self.clock.recording = True
        return self.tracer

    def _enter(self, index: int, info: RWorkerInfo) -> JoinedWorker:
        measured = info.read_gb_per_s and all(worker.read_gb_per_s for worker in self.r_workers)
        self.r_workers[index : index + 1] = [info]
        return JoinedWorker(info.num_blocks, info.read_gb_per_s if measured else None, info.host, info.name)
