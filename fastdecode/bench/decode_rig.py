"""An engine whose decode steps are measured at a batch size and a context, without computing the prompts for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fastdecode.config import EngineConfig
from fastdecode.engine import LLMEngine
from fastdecode.metrics import StepRecord
from fastdecode.protocols import AttentionBackend
from fastdecode.rounding import to_wire
from fastdecode.sampling_params import SamplingParams
from fastdecode.step import MiniBatch, ScheduledStep
from fastdecode.sworker import SWorker, set_threads
from fastdecode.sworker.sampling import SampledToken, SamplingRow
from fastdecode.types import KVLayout

WARM_UP_STEPS = 2
RANDOM_ROWS = 1024


class DecodeRig:
    """A real engine, from scheduler to sampler; only its caches are filled with random keys and values."""

    def __init__(self, config: EngineConfig, backend: AttentionBackend | None = None) -> None:
        """``config``: its schedule should be "prefill-first", so that all prompts are there before anybody decodes."""
        self.engine = LLMEngine(config, backend)
        self._num_requests = 0

    def decode(
        self, batch_size: int, context_len: int, num_steps: int, s_threads: int | None = None
    ) -> list[StepRecord]:
        """``num_steps`` decode steps of ``batch_size`` sequences, the last over ``context_len`` tokens each.

        As many tokens less as a model of so short a reach demands, or more where there is no room for the steps.
        """
        engine = self.engine
        records: list[StepRecord] = []
        if s_threads is not None:
            set_threads(s_threads)
        engine.on_step = records.append
        context_len = min(context_len, engine.s_model.max_model_len - 1)
        before = num_steps + WARM_UP_STEPS + 1  # the prompts' stand-in decodes once, too
        ids = self._add(batch_size, max(context_len - before, 1), before + 1)
        try:
            with engine.computed_by(RandomPrompts):
                while not records or not records[-1].is_decode:
                    engine.step()
            for _ in range(WARM_UP_STEPS + num_steps):
                engine.step()
        finally:
            engine.on_step = None
            engine.abort_request(ids)
        return records[-num_steps:]

    def close(self) -> None:
        """Free the engine."""
        self.engine.close()

    def _add(self, batch_size: int, prompt_len: int, output_len: int) -> list[str]:
        params = SamplingParams(
            temperature=0, max_tokens=output_len, min_tokens=output_len, ignore_eos=True, detokenize=False
        )
        ids = [f"rig-{self._num_requests + index}" for index in range(batch_size)]
        self._num_requests += batch_size
        for request_id in ids:
            self.engine.add_request(request_id, {"prompt_token_ids": [1] * prompt_len}, params)
        self.engine.clock.restart()
        return ids


class RandomPrompts(SWorker):
    """Sends random q, k and v in place of the model's, and draws token 1."""

    def run(
        self, step: ScheduledStep, sampling: Mapping[int, Sequence[SamplingRow]], overlap: bool = True
    ) -> dict[int, list[SampledToken]]:
        """See ``SWorker.run``."""
        rng = np.random.default_rng(0)
        for index, mini_batch in enumerate(step.mini_batches):
            if mini_batch:
                self._fill(index, mini_batch, rng)
        ids = [sequence_id for mini_batch in step.mini_batches for sequence_id in mini_batch.sampled_ids]
        return {sequence_id: [SampledToken(1) for _ in sampling[sequence_id]] for sequence_id in ids}

    def _fill(self, index: int, mini_batch: MiniBatch, rng: np.random.Generator) -> None:
        chunks = mini_batch.chunks
        rows, attending = int(chunks["num_rows"].sum()), int(chunks["num_rows"][chunks["attends"]].sum())
        for number, layer in enumerate(self.layout.layers):
            q = _random_rows(rng, attending, (layer.num_heads, layer.key_head_dim), self.layout)
            k = _random_rows(rng, rows, (layer.num_kv_heads, layer.key_head_dim), self.layout)
            v = _random_rows(rng, rows, (layer.num_kv_heads, layer.value_head_dim), self.layout)
            self.backend.submit(index, number, q, k, v)
            self.backend.collect(index)


def _random_rows(rng: np.random.Generator, num_rows: int, shape: tuple[int, int], layout: KVLayout) -> np.ndarray:
    """[num_rows, *shape] in the wire's dtype, from a few random rows again and again."""
    few = to_wire(rng.standard_normal((min(num_rows, RANDOM_ROWS), *shape), dtype=np.float32), layout.model_dtype)
    return np.resize(few, (num_rows, *shape)) if num_rows > len(few) else few
