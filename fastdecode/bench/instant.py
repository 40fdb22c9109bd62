"""R-workers that answer at once, with zeros: what is left of a step is the S-worker's and the engine's own work."""

from __future__ import annotations

import numpy as np

from fastdecode.errors import BackendError
from fastdecode.types import WIRE_DTYPE, KVLayout, RWorkerInfo, StepPlan, StepReport, WorkerReport

ENDLESS_BLOCKS = 1 << 40


class InstantBackend:
    """``AttentionBackend`` over one R-worker that keeps nothing."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._num_mini_batches = 1
        self._outputs: dict[int, np.ndarray] = {}
        self._zeros: dict[tuple[int, int], np.ndarray] = {}

    def open(self, layout: KVLayout) -> list[RWorkerInfo]:
        """See ``AttentionBackend.open``."""
        self._layers, self._dtype = layout.layers, WIRE_DTYPE[layout.model_dtype]
        return [RWorkerInfo("instant", ENDLESS_BLOCKS, self._block_size, 1, "none", own_cores=False)]

    def begin_step(self, plan: StepPlan) -> None:
        """See ``AttentionBackend.begin_step``."""
        self._num_mini_batches = len(plan.workers[0].mini_batches)

    def submit(self, mini_batch: int, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        """See ``AttentionBackend.submit``."""
        key = (mini_batch, self._layers[layer].value_head_dim)
        zeros = self._zeros.get(key)
        if zeros is None or zeros.shape[:2] != q.shape[:2]:
            zeros = self._zeros[key] = np.zeros((*q.shape[:2], key[1]), self._dtype)
        self._outputs[mini_batch] = zeros

    def ready(self, mini_batch: int) -> bool:
        """See ``AttentionBackend.ready``."""
        return True

    def collect(self, mini_batch: int) -> np.ndarray:
        """See ``AttentionBackend.collect``."""
        return self._outputs[mini_batch]

    def end_step(self) -> StepReport:
        """See ``AttentionBackend.end_step``."""
        never = np.zeros((self._num_mini_batches, len(self._layers)))
        return StepReport((WorkerReport(never, never, 0.0, 0, ENDLESS_BLOCKS),))

    def abandon_step(self) -> None:
        """See ``AttentionBackend.abandon_step``."""

    def export(self, worker: int, sequence_id: int) -> np.ndarray:
        """Refused: there is nothing."""
        raise BackendError("export: this backend keeps nothing")

    def import_(self, worker: int, sequence_id: int, num_tokens: int, data: np.ndarray) -> None:
        """See ``AttentionBackend.import_``."""

    def admit(self) -> list[RWorkerInfo]:
        """See ``AttentionBackend.admit``."""
        return []

    def dismiss(self, worker: int) -> None:
        """See ``AttentionBackend.dismiss``."""

    def close(self) -> None:
        """See ``AttentionBackend.close``."""
