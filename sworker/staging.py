"""Staging: q, k, v from the model's tensors to the numpy buffers of the seam, and o back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from fastdecode.core.protocols import AttentionBackend

TORCH_DTYPE = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
DTYPE_NAME = {dtype: name for name, dtype in TORCH_DTYPE.items()}


def rows_of(heads: torch.Tensor) -> torch.Tensor:
    """[1, heads, T, dim] → [T, heads, dim], a view; contiguous already for most models, whose projections are."""
    return heads[0].transpose(0, 1)


def to_numpy(rows: torch.Tensor) -> np.ndarray:
    """``rows`` as a C-contiguous array sharing its memory where it can; 16-bit floats as uint16."""
    rows = rows.contiguous()
    return (rows if rows.dtype == torch.float32 else rows.view(torch.uint16)).numpy()


def from_numpy(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of :func:`to_numpy`: a tensor of ``dtype`` over the same memory."""
    tensor = torch.from_numpy(array)
    return tensor if dtype == torch.float32 else tensor.view(dtype)


class Staging(Protocol):
    """The way of one S-worker's tensors to its attention backend and back; called from the pipeline's thread."""

    def begin_step(self) -> None:
        """Forget what an abandoned step left under way."""
        ...

    def send(self, mini_batch: int, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Start q [attending rows, num_heads, dim], k and v [rows, num_kv_heads, …], of any strides, on their way."""
        ...

    def next_ready(self, mini_batches: Sequence[int]) -> int:
        """The first of ``mini_batches``, all under way, whose o can be collected; when none can, one to wait for."""
        ...

    def collect(self, mini_batch: int) -> torch.Tensor:
        """o, [attending rows, num_heads, value_head_dim], as the model's dtype or its bits; valid until ``send``."""
        ...

    def mark(self) -> None:
        """Either end of a stretch of model code, on the device's own clock where it has one."""
        ...

    def device_seconds(self) -> float | None:
        """Time between the marks of this step, pair by pair; None where the thread's own clock says it."""
        ...


class HostStaging:
    """Staging of a model on the CPU: the backend reads its memory, copied once at most, and is asked at once."""

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend = backend

    def begin_step(self) -> None:
        """Do nothing."""

    def send(self, mini_batch: int, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        self._backend.submit(mini_batch, layer, to_numpy(q), to_numpy(k), to_numpy(v))

    def next_ready(self, mini_batches: Sequence[int]) -> int:
        """See ``Staging.next_ready``; ``collect`` does the waiting."""
        return next(filter(self._backend.ready, mini_batches), mini_batches[0])

    def collect(self, mini_batch: int) -> torch.Tensor:
        """See ``Staging.collect``; over the backend's memory."""
        return torch.from_numpy(self._backend.collect(mini_batch))

    def mark(self) -> None:
        """Do nothing."""

    def device_seconds(self) -> float | None:
        return None
