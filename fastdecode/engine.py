"""The engine: requests come in and tokens go out; it drives the S-worker, its R-workers and the scheduler."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from fastdecode.api.config import EngineConfig
from fastdecode.api.outputs import RequestOutput
from fastdecode.api.request import Completion, InFlight, Request, make_request
from fastdecode.api.sampling_params import SamplingParams
from fastdecode.api.text import PromptType, read_prompt
from fastdecode.backends import (
    check_room,
    kv_port,
    make_backend,
    make_draft_backend,
    make_prefill_backend,
    make_prompt_backend,
    place_on_ray,
    prepare,
)
from fastdecode.core.errors import BackendError, ConfigError, RequestError, WorkerLostError, interrupts_deferred
from fastdecode.core.machine import usable_cores
from fastdecode.core.metrics import HOST, StateClock, StepRecord, Tracer, step_record
from fastdecode.core.protocols import AttentionBackend, Drafter, PrefillBackend, PrefillPolicy
from fastdecode.core.step import Chunk, MiniBatch, ScheduledStep
from fastdecode.core.types import KVLayout, StepReport
from fastdecode.drafting.drafters import make_drafter
from fastdecode.drafting.speculation import Speculation, num_accepted
from fastdecode.engine_setup import make_scheduler, pin_s_worker, prompt_tokens
from fastdecode.membership import Membership
from fastdecode.prefills.policy import make_prefill_policy
from fastdecode.prefills.remote_prefills import RemotePrefills
from fastdecode.scheduler import Scheduler
from fastdecode.sworker import PromptCache, SModel, SWorker, set_threads
from fastdecode.sworker.random_prompts import RandomPrompts
from fastdecode.sworker.sampling import SampledToken
from fastdecode.tensor_parallel.ranks import Ranks, begin_ranks

PATIENCE_SECONDS = 0.05
"""Most time of a step that only waits for prefill workers: its caller may have more requests."""

logger = logging.getLogger(__name__)


class LLMEngine:
    """Continuous batching over one S-worker and its R-workers; used from one thread.

    ``add_request`` and ``abort_request`` between calls of ``step``, which advances every running request by one
    token. ``on_step`` is called with a :class:`StepRecord` after every step.
    """

    def __init__(self, config: EngineConfig, backend: AttentionBackend | None = None) -> None:
        self.config = config
        self.clock = StateClock()
        self.tracer: Tracer | None = None
        self.on_step: Callable[[StepRecord], None] | None = None
        self.overlap = True
        self._in_flight = InFlight()
        self._ended_early: list[Request] = []
        self._lost_between: tuple[int, ...] = ()
        self._ids = itertools.count()
        self._closed = False
        self._cleanup = contextlib.ExitStack()
        try:
            self._load(backend)
        except BaseException:
            self.close()
            raise
        if config.trace:
            self.start_tracing()

    def _load(self, backend: AttentionBackend | None) -> None:
        """The model, the R-workers for it, and the scheduler over them."""
        if backend is None:
            prepare(self.config)
        r_cores = self.config.r_core_list or usable_cores()
        self._cleanup.callback(os.sched_setaffinity, 0, os.sched_getaffinity(0))
        self._prefill_backend = make_prefill_backend(self.config)  # its processes load their models meanwhile
        if self._prefill_backend:
            self._cleanup.callback(self._prefill_backend.close)
        ray_job = None if backend else place_on_ray(self.config)  # refused before a model is loaded
        if ray_job:
            self._cleanup.callback(ray_job.end)
        ranks = self._begin_ranks()
        set_threads(pin_s_worker(self.config))
        self.s_model = SModel(self.config, ranks.rank if ranks else None)
        r_cores = self.config.r_core_list or r_cores
        self.backend = backend or make_backend(self.config, r_cores, self._prefill_backend, ray_job)
        self._shared = ranks.backend(self.backend) if ranks else None
        self.backend = self._shared or self.backend
        self._cleanup.callback(self.backend.close)
        layout = replace(self.s_model.layout, isa=self.config.uniform_arithmetic, kv_port=kv_port(self.config))
        self.r_workers = self.backend.open(layout)
        check_room(self.config, self.s_model.max_model_len, self.s_model.layout, self.r_workers)
        own_cores = self.s_model.on_gpu or any(worker.own_cores for worker in self.r_workers)
        self.num_mini_batches = self.config.num_mini_batches or (2 if own_cores else 1)
        scratch_tokens = prompt_tokens(self.config, self.s_model, self.r_workers)
        if self._shared:
            self._shared.begin_prompts(scratch_tokens)
        prompts = self._make_prompts(layout, scratch_tokens)
        self._s_worker = self._make_s_worker(prompts)
        self._drafter = self._make_drafter()
        scheduler = make_scheduler(
            self.config, self.s_model, self._s_worker, self.r_workers, self.num_mini_batches, scratch_tokens
        )
        if self._prefill_backend:
            scheduler.remote_prompts.policy = self._open_prefill_workers(self._prefill_backend)
        self.replace_scheduler(scheduler)

    def _begin_ranks(self) -> Ranks | None:
        """The other S-worker processes of tensor parallelism, and this one's part of the settings."""
        ranks = begin_ranks(self.config)
        if ranks:
            self._cleanup.callback(ranks.close)
            self.config = ranks.config
        return ranks

    def _make_s_worker(self, prompts: PromptCache | None) -> SWorker:
        model, shared = self.s_model, self._shared
        if shared:
            lead = shared.lead
            return SWorker(
                model.model, model.layout, self.backend, self.clock, prompts=prompts, lead=lead, in_order=True
            )
        s_worker = SWorker(model.model, model.layout, self.backend, self.clock, prompts=prompts)
        if not self.config.enforce_eager:
            s_worker.capture_graphs(self.num_mini_batches, self.config.max_num_seqs)
        return s_worker

    def _make_prompts(self, layout: KVLayout, num_tokens: int) -> PromptCache | None:
        """What attends up to ``num_tokens`` tokens of prompts on this process's cores; None: torch, or nothing does."""
        if self.s_model.on_gpu or not num_tokens:
            return None
        backend = make_prompt_backend(self.config, layout, num_tokens, self.r_workers)
        self._cleanup.callback(backend.close)
        return PromptCache(backend)

    def _make_drafter(self) -> Drafter | None:
        """What drafts tokens, where any are to be."""
        config, model = self.config, self.s_model
        if config.speculative is None:
            return None
        return make_drafter(
            config,
            config.speculative,
            model,
            self._s_worker,
            self.num_mini_batches,
            lambda: self.scheduler,
            lambda layout: make_draft_backend(config, layout, model.max_model_len),
            self._cleanup,
        )

    def _open_prefill_workers(self, backend: PrefillBackend) -> PrefillPolicy:
        """What decides which prompts are theirs; BackendError where one has another model."""
        model = self.s_model
        num_workers = backend.open(model.identity, model.max_model_len, model.vocab_size, model.layout.model_dtype)
        return make_prefill_policy(self.config, model, self._s_worker, self.r_workers, num_workers)

    def replace_scheduler(self, scheduler: Scheduler) -> None:
        """Have ``scheduler`` decide from here on, steps as well as moves; the engine must be idle, its caches empty."""
        self.scheduler = scheduler
        self._membership = Membership(self.backend, scheduler, self.r_workers, self._tell)
        method = self.config.prefill_parallel
        drafter = self._drafter
        self.speculation = Speculation(drafter, scheduler, self._in_flight, self.clock) if drafter else None
        self.prefills = (
            RemotePrefills(self._prefill_backend, scheduler, self.r_workers, method) if self._prefill_backend else None
        )

    def add_request(
        self, request_id: str, prompt: PromptType, params: SamplingParams, arrival_seconds: float | None = None
    ) -> None:
        """Queue a request that arrived at ``arrival_seconds`` of ``time.perf_counter`` (now).

        RequestError or ConfigError when it can never run.
        """
        if self._closed:
            raise RequestError("the engine is closed")
        if request_id in self._in_flight:
            raise RequestError(f"request id {request_id!r} is already in use")
        text, token_ids = read_prompt(
            prompt, self.s_model.tokenizer, self.s_model.vocab_size, self.s_model.max_model_len
        )
        params.check_token_ids(self.s_model.vocab_size)
        first_id, *_ = itertools.islice(self._ids, params.n)
        request = make_request(self.s_model, request_id, text, token_ids, params, first_id, self.config.seed)
        self.scheduler.add(request.completions[0].sequence)
        request.arrival_seconds = request.arrival_seconds if arrival_seconds is None else arrival_seconds
        self._in_flight.add(request)

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Drop requests, waiting or running; unknown ids are ignored, as those may just have finished."""
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            request = self._in_flight.remove(request_id)
            for completion in request.completions if request else ():
                if completion.finish_reason is None:
                    self._finish(completion, "abort")
        if self.prefills:
            self.prefills.cancel_unwanted()
        self._settle()

    def has_unfinished_requests(self) -> bool:
        """True while any request waits or runs."""
        return len(self._in_flight) > 0

    def step(self) -> list[RequestOutput]:
        """One token for every running request, plus prompt chunks; outputs of the requests that grew."""
        if not len(self._in_flight):
            return []
        try:
            with interrupts_deferred():
                self._membership.update()
                if self.prefills:
                    self.prefills.update()
            if self.speculation:
                self.speculation.draft()
            step = self._begin()
            sampled = self._compute(step)
            with interrupts_deferred():
                outputs = self._end(step, sampled)
        except BaseException:
            self.backend.abandon_step()
            raise
        if self.prefills and not step.num_tokens and not step.arrived:
            self.prefills.wait(PATIENCE_SECONDS)
        return outputs

    def look_around(self) -> None:
        """For an engine that has nothing to do: count workers in that have come, and out that are gone.

        WorkerLostError when none is left.
        """
        if not self.has_unfinished_requests():
            if self.prefills:
                self.prefills.update()
            self._membership.update()
            self._tell()

    def drain_r_worker(self, index: int) -> None:
        """Let R-worker ``index`` of ``r_workers`` go once its sequences have moved to others, which takes some steps.

        ConfigError where there is none. The last one goes on until another has joined.
        """
        self._membership.drain(index)

    def score(self, token_ids: list[int]) -> np.ndarray:
        """Natural-log probability of every token after the first, given those before it: float32 [len - 1].

        All attention runs on the first R-worker that is left, over the cache as it stores keys and values. The engine
        must be idle.
        """
        if self.has_unfinished_requests():
            raise RequestError("score needs an idle engine: finish or abort its requests first")
        read_prompt(token_ids, None, self.s_model.vocab_size, self.s_model.max_model_len + 1)
        first = self.scheduler.workers.present[0]
        if len(token_ids) > (room := self.r_workers[first].num_blocks * self.config.block_size):
            raise RequestError(f"score keeps a sequence on one R-worker, which has room for {room} tokens: give fewer")
        self.reset_prefix_cache()  # it may fill the cache, and the scheduler knows nothing of what is scored
        chunk = Chunk(next(self._ids), first, 0, token_ids, scored=True)
        nothing = tuple(() for _ in self.r_workers)
        step = ScheduledStep((MiniBatch.of([chunk]),), nothing)
        self.backend.begin_step(step.to_step_plan())
        try:
            logprobs = self._s_worker.score(step).numpy()
        finally:
            self.backend.abandon_step()
        if self._tell():
            raise WorkerLostError("an R-worker was lost while it scored: score once more on those that are left")
        return logprobs

    def reset_prefix_cache(self) -> None:
        """Forget every retained prefix, for instance when weights were changed; running requests go on."""
        self.scheduler.reset_prefix_cache()
        self._settle()

    def start_tracing(self) -> Tracer:
        """Keep what every side does from now on."""
        self.tracer = self.tracer or Tracer()
        self.clock.recording = True
        return self.tracer

    @contextlib.contextmanager
    def computed_by(self, make_s_worker: Callable[..., SWorker]) -> Iterator[None]:
        """Have another S-worker, ``make_s_worker(model, layout, backend, clock)``, compute the steps meanwhile.

        For measurements that need full caches and not the prompts that fill them. Where ranks share the model the
        others know ``RandomPrompts`` alone.
        """
        if self._shared and make_s_worker is not RandomPrompts:
            raise ConfigError("tensor_parallel_size: another S-worker can compute the steps of one rank only: give 1")
        own, lead = self._s_worker, {"lead": partial(self._shared.lead, at_random=True)} if self._shared else {}
        self._s_worker = make_s_worker(own.model, own.layout, own.backend, own.clock, **lead)
        try:
            yield
        finally:
            self._s_worker = own

    def close(self) -> None:
        """Free the R-workers, write the trace and give this thread its cores back; may be called twice."""
        self._closed = True
        self._cleanup.close()
        if self.tracer and self.config.trace:
            self.tracer.write(self.config.trace)

    def _begin(self) -> ScheduledStep:
        """Schedule a step and open it on the R-workers; if they refuse, the scheduler keeps its controls."""
        with interrupts_deferred():
            step = self.scheduler.schedule(time.perf_counter())
            self._forget_prompts_that_left()
            if not step.num_tokens and not step.arrived and not len(self.scheduler.remote_prompts):
                raise BackendError("no request can run: the scheduler promised room that it does not have (a bug)")
            try:
                self.backend.begin_step(step.to_step_plan())
            except BaseException:
                self.scheduler.take_back(step)
                raise
        if self.prefills:
            self.prefills.hand_out(step.prefills)
        self._note_starts(step)
        return step

    def _note_starts(self, step: ScheduledStep) -> None:
        """Requests whose prompt begins with this step have waited until now."""
        if not step.num_starts:
            return
        now = time.perf_counter()
        here = [int(chunk["sequence_id"]) for part in step.mini_batches for chunk in part.prompts]
        for sequence_id in (*here, *(each.sequence_id for each in step.prefills)):
            request, _ = self._in_flight.family(sequence_id)
            request.started_seconds = request.started_seconds or now

    def _compute(self, step: ScheduledStep) -> dict[int, list[SampledToken]]:
        sampled = [sequence_id for mini_batch in step.mini_batches for sequence_id in mini_batch.sampled_ids]
        arrived = self.prefills.logits(step.arrived) if self.prefills else {}
        sampling = {each: self._in_flight.sampling_rows(each, step.drafts.get(each)) for each in (*sampled, *arrived)}
        return self._s_worker.run(step, sampling, self.overlap, arrived)

    def _end(self, step: ScheduledStep, sampled: dict[int, list[SampledToken]]) -> list[RequestOutput]:
        """Commit the step everywhere at once, and hand out what it made."""
        report = self.backend.end_step()
        accepted = {each: num_accepted(sampled[each], tokens) for each, tokens in step.drafts.items()}
        self.scheduler.commit(step, accepted)
        sampled = sampled | {each: sampled[each][: 1 + count] for each, count in accepted.items()}
        self._lose(report.lost, sampled)
        self._membership.leaving(report.leaving)
        grown, num_output_tokens = self._take(sampled, accepted)
        outputs = [request.output() for request in (*grown, *self._ended_early)]
        self._ended_early.clear()
        self._settle()
        if step.num_tokens or step.arrived:
            self._record(step, report, num_output_tokens)
        return outputs

    def _lose(self, workers: Sequence[int], sampled: dict[int, list[SampledToken]]) -> None:
        """What lost R-workers alone held is computed again elsewhere; tokens that they had a part in are not taken."""
        for sequence_id in self.scheduler.spoilt(workers):
            sampled.pop(sequence_id, None)
            self._forget(sequence_id)
        for sequence in (hopeless for worker in workers for hopeless in self.scheduler.lost(worker)):
            request, completions = self._in_flight.family(sequence.sequence_id)
            for completion in completions:
                self._finish(completion, "error")
            logger.error("request %s: no R-worker that is left has room for it", request.request_id)
            if request.finished:
                self._ended_early.append(request)
                self._in_flight.remove(request.request_id)

    def _take(self, sampled: dict[int, list[SampledToken]], drafted: Container[int] = ()) -> tuple[list[Request], int]:
        """Append the sampled tokens and end what is finished; the requests that grew, and by how many tokens.

        Those of a sequence in ``drafted`` follow each other; another's are of one place, for a completion each.
        """
        now = self.clock.enter(HOST)
        grown: dict[str, Request] = {}
        num_tokens = 0
        for sequence_id, tokens in sampled.items():
            request, completions = self._in_flight.family(sequence_id)
            if len(completions) > 1:
                self.scheduler.fork_siblings(completions[0].sequence)
            following = [tokens] if sequence_id in drafted else [[token] for token in tokens]
            for each, its_tokens in zip(completions, following, strict=True):
                num_tokens += self._grow(each, its_tokens, request.params)
            grown[request.request_id] = request
        for request in grown.values():
            request.token_seconds.append(now)
            if request.finished:
                self._in_flight.remove(request.request_id)
        return list(grown.values()), num_tokens

    def _grow(self, completion: Completion, tokens: list[SampledToken], params: SamplingParams) -> int:
        """Append ``tokens`` up to one that ends ``completion``; how many that were."""
        for count, token in enumerate(tokens, 1):
            completion.append(token, params, self.s_model.eos_token_ids)
            if completion.finish_reason is not None:
                self._finish(completion, completion.finish_reason)
                return count
        return len(tokens)

    def _finish(self, completion: Completion, reason: str) -> None:
        completion.finish_reason = reason
        sequence = completion.sequence
        self._in_flight.end(completion)
        self.scheduler.finish(sequence, reason)
        self._forget(sequence.sequence_id)

    def _forget(self, sequence_id: int) -> None:
        """``sequence_id`` has ended, or what was cached of it is lost."""
        if self._shared and self._s_worker.prompts.sequence_ids:
            self._shared.forget(sequence_id)
        self._s_worker.forget(sequence_id)
        if self.speculation:
            self.speculation.drafter.forget(sequence_id)

    def _forget_prompts_that_left(self) -> None:
        """Of prompts that were preempted the S-worker keeps nothing: others count on the scratch."""
        prompts = self.scheduler.residents.prompts
        for sequence_id in self._s_worker.prompts.sequence_ids:
            if sequence_id not in prompts or not prompts[sequence_id].uses_scratch:
                self._forget(sequence_id)

    def _settle(self) -> None:
        """When nothing runs, tell the R-workers of the last releases, so that an idle engine holds no blocks."""
        if self.scheduler.has_controls and not self.scheduler.has_unfinished:
            self._tell()

    def _tell(self) -> tuple[int, ...]:
        """Tell R-workers what the scheduler has for them, and it which of them are lost; returns those."""
        step = self.scheduler.controls_alone()
        self.backend.begin_step(step.to_step_plan())
        lost = self.backend.end_step().lost
        self._lost_between += lost
        self._lose(lost, {})
        return lost

    def _record(self, step: ScheduledStep, report: StepReport, num_output_tokens: int) -> None:
        report = replace(report, lost=(*self._lost_between, *report.lost))
        self._lost_between = ()
        seconds = self.clock.snapshot()
        self.clock.restart()
        if self.tracer:
            self.tracer.add(self.clock.intervals, report)
            self.clock.intervals.clear()
        record = step_record(
            step, report, seconds, num_output_tokens, self.overlap, self.scheduler.residents.num_copies
        )
        drafting = (self.speculation.s_seconds, self.speculation.wait_seconds) if self.speculation else (0.0, 0.0)
        s_seconds, wait_seconds = record.s_seconds - drafting[0], record.wait_seconds - drafting[1]
        self.scheduler.observe(step, s_seconds, wait_seconds, record.r_seconds)
        if self.on_step:
            self.on_step(record)
