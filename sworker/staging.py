"""Rows between the model's tensors and the numpy buffers of the seam."""

from __future__ import annotations

import numpy as np
import torch

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
