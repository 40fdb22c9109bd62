"""The engine: takes requests and returns tokens. One cycle runs the steps on the S-worker and its R-workers."""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Iterable

import numpy as np

from fastdecode.api.config import EngineConfig
from fastdecode.api.outputs import RequestOutput
from fastdecode.api.request import make_request
from fastdecode.api.sampling_params import SamplingParams
from fastdecode.api.text import PromptType, read_prompt
from fastdecode.core.errors import BackendError, NoRWorkerError, RequestError, WorkerLostError, interrupts_deferred
from fastdecode.core.metrics import StepRecord
from fastdecode.core.protocols import AttentionBackend
from fastdecode.core.step import Chunk, MiniBatch, ScheduledStep
from fastdecode.cycle import Cycle
from fastdecode.engine.compose.build import build
from fastdecode.engine.live import Sampled
from fastdecode.scheduler import Scheduler

END_SECONDS = 10.0
"""Most seconds for parking unused prefixes when an engine ends."""


logger = logging.getLogger(__name__)


class LLMEngine:
    """Continuous batching over one S-worker and its R-workers. Use it from one thread.
    Call ``add_request`` and ``abort_request`` between calls of ``step``, which advances every running request by one
    token. ``cycle`` runs the steps in ``world``. Before and after a step it calls its companions: ``membership``,
    ``parking``, ``prefills`` and ``speculation`` (each but the first may be None). ``r_workers``: by index, lost ones
    too. ``in_flight``: unfinished requests. ``journal``: records these requests. ``trouble``: why no step can run; ""
    if steps run.
    """

    def __init__(self, config: EngineConfig, backend: AttentionBackend | None = None) -> None:
        """Load the model and open the R-workers: ``backend`` if given, else those that ``config`` names."""
        self.trouble, self._deadline = "", 0.0
        self._closed = False
        self._cleanup = contextlib.ExitStack()
        try:
            self._parts = build(config, backend, self._cleanup)
        except BaseException:
            self.close()
            raise
        self.config = self._parts.config
        self.s_model, self.num_mini_batches = self._parts.s_model, self._parts.num_mini_batches
        self.world, self.prefills, self.speculation = self._parts.world, self._parts.prefills, self._parts.speculation
        self.membership, self.parking = self._parts.membership, self._parts.parking
        self.backend, self.r_workers = self.world.backend, self.world.r_workers
        self._requests, self.in_flight = self._parts.requests, self._parts.requests.in_flight
        self.journal = self._requests.journal
        self._ids = itertools.count(self.journal.next_sequence_id)
        self.cycle: Cycle[Sampled] = Cycle(self._parts.scheduler, self.world, self._requests, self._parts.companions)
        if config.trace:
            self.world.start_tracing()
            self._cleanup.callback(self._write_trace, config.trace)
        self._cleanup.callback(self._park_rest)

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> LLMEngine:
        return cls(engine_args)

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler, which chooses the rows of each step."""
        return self.cycle.scheduler

    @property
    def on_step(self) -> Callable[[StepRecord], None] | None:
        """A function that is called with a :class:`StepRecord` after each step that had rows or sampled tokens."""
        return self.cycle.on_step

    @on_step.setter
    def on_step(self, called: Callable[[StepRecord], None] | None) -> None:
        self.cycle.on_step = called

    def replace_scheduler(self, scheduler: Scheduler) -> None:
        """Replace the scheduler by ``scheduler``. The engine must be idle and its caches empty."""
        self.cycle = Cycle(scheduler, self.world, self._requests, self._parts.companions, self.on_step)

    def add_request(
        self, request_id: str, prompt: PromptType, params: SamplingParams, arrival_seconds: float | None = None
    ) -> None:
        """Queue a request that arrived at ``arrival_seconds`` of ``time.perf_counter``; None means now.
        If the journal knows a request with this id, prompt and parameters, it continues where it stopped. Raise
        RequestError or ConfigError if the request can never run.
        """
        if self._closed:
            raise RequestError("the engine is closed")
        if request_id in self.in_flight:
            raise RequestError(f"request id {request_id!r} is already in use")
        text, token_ids = read_prompt(
            prompt, self.s_model.tokenizer, self.s_model.vocab_size, self.s_model.max_model_len
        )
        params.check_token_ids(self.s_model.vocab_size)
        self.world.sources.check(params)
        past = self._requests.journal.past(request_id, token_ids, params)
        first_id, *_ = [past.asked.sequence_id] if past else itertools.islice(self._ids, params.n)
        request = make_request(self.s_model, request_id, text, token_ids, params, first_id, self.config.seed)
        for sequence in past.replay(request) if past else [request.completions[0].sequence]:
            self.scheduler.add(sequence)
        request.arrival_seconds = request.arrival_seconds if arrival_seconds is None else arrival_seconds
        self._requests.enter(request)

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Abort waiting or running requests. Unknown ids are ignored, since the requests may just have finished."""
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            self._requests.abort(self.cycle, request_id)
        if self.prefills:
            self.prefills.cancel_unwanted(self.scheduler)
        self._attempt(self.cycle.settle, waits=False)

    def has_unfinished_requests(self) -> bool:
        """Return whether a request waits or runs, or has an output that ``step`` has not returned."""
        return len(self._requests) > 0

    def step(self) -> list[RequestOutput]:
        """Run one step: a token for every running request, plus prompt chunks.
        Return the outputs of requests that got tokens or ended.
        """
        if self.in_flight:
            self._attempt(self.cycle.turn)
        return self._requests.take_outputs()

    def look_around(self) -> None:
        """Check, while the engine has no requests, which R-workers have joined and which are lost.
        Raise WorkerLostError if none has been left for ``wait_for_r_workers`` seconds.
        """
        if not self.has_unfinished_requests():
            self._attempt(self.cycle.look_around)

    def drain_r_worker(self, index: int) -> None:
        """Move all sequences away from R-worker ``index`` of ``r_workers`` in the next steps; then the R-worker leaves.
        Raise ConfigError if there is no such R-worker. The last R-worker stays until another has joined.
        """
        self.membership.drain(self.scheduler, index)

    def score(self, token_ids: list[int]) -> np.ndarray:
        """Return the natural log-probability of every token after the first, given all before it: float32 [len - 1].

        The first R-worker present computes all attention, over its cache in the KV dtype. The engine must be idle.
        """
        if self.has_unfinished_requests():
            raise RequestError("score needs an idle engine: finish or abort its requests first")
        read_prompt(token_ids, None, self.s_model.vocab_size, self.s_model.max_model_len + 1)
        first = self.scheduler.store.workers.present[0]
        if len(token_ids) > (room := self.r_workers[first].num_blocks * self.config.block_size):
            raise RequestError(f"score keeps a sequence on one R-worker, which has room for {room} tokens: give fewer")
        self._forget_prefixes()  # scoring may need every block of the cache
        chunk = Chunk(next(self._ids), first, 0, token_ids, scored=True)
        logprobs = self.world.score(ScheduledStep((MiniBatch.of([chunk]),), tuple(() for _ in self.r_workers)))
        if self.cycle.tell():
            raise WorkerLostError("an R-worker was lost during scoring: call score again on the R-workers that remain")
        return logprobs

    def reset_prefix_cache(self) -> None:
        """Evict every retained prefix, for instance after the weights changed; running requests continue.

        This engine no longer uses prefixes that were parked before this call; a later engine does.
        """
        if self.parking:
            self.parking.renew(self.scheduler, f"{self.s_model.kv_identity} {secrets.token_hex(16)}")
        self._forget_prefixes()

    def _forget_prefixes(self) -> None:
        self.scheduler.store.prefixes.reset()
        self._attempt(self.cycle.settle, waits=False)

    def close(self) -> None:
        """Free the R-workers, write the trace, and restore this thread's cores; may be called twice."""
        self._closed = True
        self._cleanup.close()

    def _attempt(self, work: Callable[[], object], waits: bool = True) -> None:
        """Call ``work`` if an R-worker is present, or if ``waits`` and one has joined since.
        Raise WorkerLostError if there has been none for ``wait_for_r_workers`` seconds.
        """
        try:
            if not self.trouble or (waits and self._admitted_one()):
                work()
        except NoRWorkerError as error:
            seconds = self.config.wait_for_r_workers
            self.trouble, self._deadline = str(error), time.monotonic() + seconds
            logger.warning("%s: waiting for one, %g s at most", error, seconds)

    def _admitted_one(self) -> bool:
        """Add R-workers that have joined, and handle the loss of all earlier ones; return whether any has joined."""
        with interrupts_deferred():
            if self.membership.admit(self.cycle):
                self.trouble = ""
                self.cycle.tell()
                return True
        if time.monotonic() > self._deadline:
            raise WorkerLostError(f"{self.trouble}; none joined within {self.config.wait_for_r_workers:g} s")
        # Seconds between two checks whether an R-worker has joined
        look_seconds = 0.05
        time.sleep(look_seconds)
        return False

    def _park_rest(self) -> None:
        """Park prefixes that no request uses on R-workers' disks; stop after END_SECONDS."""
        if self.parking and not self.trouble:
            with contextlib.suppress(BackendError):
                self.parking.finish(self.cycle, END_SECONDS)

    def _write_trace(self, path: str) -> None:
        if self.world.tracer:
            self.world.tracer.write(path)
