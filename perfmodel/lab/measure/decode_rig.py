"""An engine whose decode steps are measured at a batch size and context, without computing prompts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from fastdecode.api.config import EngineConfig
from fastdecode.api.sampling_params import SamplingParams
from fastdecode.core.dtypes import WIRE_DTYPE
from fastdecode.core.errors import BackendError
from fastdecode.core.metrics import StepRecord
from fastdecode.core.protocols import AttentionBackend
from fastdecode.core.types import RWorkerInfo, StepPlan, StepReport, WorkerReport
from fastdecode.core.weighing import Queries, WeighedRow
from fastdecode.engine.engine import LLMEngine
from fastdecode.engine.live import LiveWorld
from fastdecode.kinds.layout import KVLayout
from fastdecode.sworker import set_threads
from fastdecode.sworker.run.random_prompts import RandomPrompts


class DecodeRig:
    """A real engine from scheduler to sampler, whose caches are filled with random keys and values."""

    def __init__(self, config: EngineConfig, backend: AttentionBackend | None = None) -> None:
        """``config`` must have schedule "prefill-first", so that all prompts are cached before any sequence decodes."""
        self.engine = LLMEngine(config, backend)
        self._cores = os.sched_getaffinity(0)
        self._num_requests = 0

    def decode(
        self, batch_size: int, context_len: int, num_steps: int, s_threads: int | None = None
    ) -> list[StepRecord]:
        """Return ``num_steps`` decode steps of ``batch_size`` sequences, the last over ``context_len`` tokens each.
        A ``context_len`` beyond the model's limit, or too short for ``num_steps``, is replaced by the nearest possible
        one. The steps run on the cores that this engine was created on, even if the thread has been moved to other
        cores since.
        """
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self._cores)
        try:
            return self._decode(batch_size, context_len, num_steps, s_threads)
        finally:
            os.sched_setaffinity(0, before)

    def close(self) -> None:
        """Close the engine and free its memory."""
        self.engine.close()

    def _decode(self, batch_size: int, context_len: int, num_steps: int, s_threads: int | None) -> list[StepRecord]:
        engine = self.engine
        records: list[StepRecord] = []
        if s_threads is not None:
            set_threads(s_threads)
        engine.on_step = records.append
        context_len = min(context_len, engine.s_model.max_model_len - 1)
        warm_up_steps = 2
        before = num_steps + warm_up_steps + 1  # + 1: the prompt's step yields one token
        ids = self._add(batch_size, max(context_len - before, 1), before + 1)
        try:
            with random_prompts(engine.world):
                while not records or not records[-1].is_decode:
                    engine.step()
            for _ in range(warm_up_steps + num_steps):
                engine.step()
        finally:
            engine.on_step = None
            engine.abort_request(ids)
        return records[-num_steps:]

    def _add(self, batch_size: int, prompt_len: int, output_len: int) -> list[str]:
        params = SamplingParams(
            temperature=0, max_tokens=output_len, min_tokens=output_len, ignore_eos=True, detokenize=False
        )
        ids = [f"rig-{self._num_requests + index}" for index in range(batch_size)]
        self._num_requests += batch_size
        for request_id in ids:
            self.engine.add_request(request_id, {"prompt_token_ids": [1] * prompt_len}, params)
        self.engine.world.clock.restart()
        return ids


@contextlib.contextmanager
def random_prompts(world: LiveWorld) -> Iterator[None]:
    """Within the context, let all ranks fill caches with random keys and values instead of computing prompts."""
    own, lead = world.s_worker, partial(world.ranks.lead, by="random") if world.ranks else None
    world.s_worker = RandomPrompts(own.code, own.layout, own.backend, own.clock, lead=lead)
    try:
        yield
    finally:
        world.s_worker = own


ENDLESS_BLOCKS = 1 << 40


class InstantBackend:
    """Stands for an R-worker that returns zeros at once and stores nothing, so that only the S-worker takes time.

    Its methods are those of ``AttentionBackend``."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._num_mini_batches = 1
        self._outputs: dict[int, np.ndarray] = {}
        self._zeros: dict[tuple[int, int], np.ndarray] = {}

    def open(self, layout: KVLayout) -> list[RWorkerInfo]:
        self._layers, self._dtype = layout.layers, WIRE_DTYPE[layout.model_dtype]
        return [RWorkerInfo("instant", ENDLESS_BLOCKS, self._block_size, 1, "none", own_cores=False)]

    def begin_step(self, plan: StepPlan) -> None:
        self._num_mini_batches = len(plan.workers[0].mini_batches)

    def submit(self, mini_batch: int, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        of = self._layers[layer]
        shape = len(q), *of.row_shapes[3]
        key = mini_batch, shape[2]
        zeros = self._zeros.get(key)
        if zeros is None or zeros.shape != shape:
            zeros = self._zeros[key] = np.zeros(shape, self._dtype)
        self._outputs[mini_batch] = zeros

    def ready(self, mini_batch: int) -> bool:
        return True

    def collect(self, mini_batch: int) -> np.ndarray:
        return self._outputs[mini_batch]

    def weigh(self, rows: Sequence[WeighedRow], queries: Queries) -> list[np.ndarray | None]:
        """Return no attention weights, since nothing is kept."""
        return [None] * len(rows)

    def end_step(self) -> StepReport:
        never = np.zeros((self._num_mini_batches, len(self._layers)))
        return StepReport((WorkerReport(never, never, 0.0, 0, ENDLESS_BLOCKS),))

    def abandon_step(self) -> None:
        """Do nothing, since nothing is kept."""

    def export(self, worker: int, sequence_id: int, start: int = 0, num_tokens: int | None = None) -> np.ndarray:
        """Raise an error, since nothing is kept."""
        raise BackendError("export: this backend keeps nothing")

    def import_(self, worker: int, sequence_id: int, num_tokens: int, data: np.ndarray, start: int = 0) -> None:
        """Do nothing, since nothing is kept."""

    def admit(self, vacant: Sequence[int] = ()) -> dict[int, RWorkerInfo]:
        return {}

    def dismiss(self, worker: int) -> None:
        """Do nothing, since nothing is kept."""

    def close(self) -> None:
        """Do nothing, since nothing is kept."""
