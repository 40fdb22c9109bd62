"""An S-worker without a model, for measurements that need full caches quickly."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from fastdecode.core.dtypes import to_wire
from fastdecode.core.step import MiniBatch, ScheduledStep
from fastdecode.kinds.layout import KVLayout
from fastdecode.sworker.run.s_worker import SWorker
from fastdecode.sworker.sampling import SampledToken, SamplingRow
from fastdecode.sworker.sampling.prompt_scores import ScoredPrompt


class RandomPrompts(SWorker):
    """An S-worker, on every tensor-parallel rank, that sends random q, k and v, and always samples token 1."""

    def run(
        self,
        step: ScheduledStep,
        sampling: Mapping[int, Sequence[SamplingRow]],
        overlap: bool = True,
        arrived: Mapping[int, np.ndarray] = MappingProxyType({}),
        scored: Mapping[int, ScoredPrompt] = MappingProxyType({}),
    ) -> dict[int, list[SampledToken]]:
        with self._lead(step, overlap) if self._lead else contextlib.nullcontext():
            self._fill(step)
        ids = [sequence_id for mini_batch in step.mini_batches for sequence_id in mini_batch.sampled_ids]
        return {sequence_id: [SampledToken(1) for _ in sampling[sequence_id]] for sequence_id in ids}

    def follow(self, step: ScheduledStep, overlap: bool) -> None:
        """Send random rows for ``step`` on a rank other than rank 0, as ``run`` does on rank 0."""
        self._fill(step)

    def _fill(self, step: ScheduledStep) -> None:
        rng = np.random.default_rng(0)
        for index, mini_batch in enumerate(step.mini_batches):
            if mini_batch:
                self._fill_mini_batch(index, mini_batch, rng)

    def _fill_mini_batch(self, index: int, mini_batch: MiniBatch, rng: np.random.Generator) -> None:
        chunks = mini_batch.chunks
        rows, attending = int(chunks["num_rows"].sum()), int(chunks["num_rows"][chunks["attends"]].sum())
        for number, layer in enumerate(self.layout.layers):
            sized = zip((attending, rows, rows), layer.row_shapes[:3], strict=True)
            q, k, v = (_random_rows(rng, count, shape, self.layout) for count, shape in sized)
            self.backend.submit(index, number, q, k, v)
            self.backend.collect(index)


def _random_rows(rng: np.random.Generator, num_rows: int, shape: tuple[int, int], layout: KVLayout) -> np.ndarray:
    """Return random rows, [num_rows, *shape], in the wire's dtype; after some 1,000 the same rows repeat."""
    random_rows = 1024
    few = to_wire(rng.standard_normal((min(num_rows, random_rows), *shape), dtype=np.float32), layout.model_dtype)
    return np.resize(few, (num_rows, *shape)) if num_rows > len(few) else few
