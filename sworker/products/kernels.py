"""The C++ integer products: chooses an instruction set for this process, and tests that its products are exact."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fastdecode import _sworker
from fastdecode.core.errors import ModelLoadError
from fastdecode.sworker.model.prepack import equal_within_rounding

logger = logging.getLogger(__name__)

ACTIVATIONS = ("silu", "gelu_tanh")

PROOF_SHAPES = (*((width, num_rows) for width in (4, 18, 64) for num_rows in (*range(1, 13), 27)), (8192, 3))
"""(Row width, number of rows) of each tested product: all row counts of one kernel pass, and several passes."""


@functools.cache
def integer_isa() -> str:
    """Return the fastest instruction set of this CPU whose products are exact. Raise ModelLoadError if none is."""
    use_openmp()
    limit = os.environ.get("FASTDECODE_ISA", "")
    # Kernels that each value of FASTDECODE_ISA allows, which limits R-workers too; other values allow all
    limited_to = {"scalar": ("scalar",), "avx2": ("scalar", "avx2"), "avx512": ("scalar", "avx2")}
    allowed = limited_to.get(limit, tuple(_sworker.integer_isas()))
    for isa in reversed(_sworker.integer_isas()):
        if isa not in allowed:
            continue
        if is_exact(isa):
            logger.info("products of integers: %s", isa)
            return isa
        logger.warning("products of integers with %s are wrong on this CPU and are not used", isa)
    raise ModelLoadError("quantization: no product of integers is exact on this CPU: leave --quantization out")


def use_openmp() -> None:
    """Run the kernels on the threads that torch's OpenMP has, if torch uses OpenMP."""
    openmp = ctypes.CDLL(None)
    functions = [getattr(openmp, name) for name in ("GOMP_parallel", "omp_get_thread_num") if hasattr(openmp, name)]
    if len(functions) == 2:
        _sworker.use_openmp(*(ctypes.cast(each, ctypes.c_void_p).value or 0 for each in functions))


def is_exact(isa: str) -> bool:
    """Return whether matrix products with ``isa`` are exact, also for the largest int8 numbers of either sign."""
    return all(_is_exact(isa, width, num_rows) for width, num_rows in PROOF_SHAPES)


def _is_exact(isa: str, width: int, num_rows: int) -> bool:
    rng, num_columns = np.random.default_rng(width), 70
    codes = rng.integers(-127, 128, (num_columns, width), dtype=np.int8)
    codes[:4] = [[127], [-127], [127], [-127]]
    codes[2:4, ::2] *= -1
    rows = rng.integers(-127, 128, (num_rows, width)).astype(np.float32)
    rows[0] = 127.0
    rows[num_rows // 2] = -127.0
    rows[num_rows // 3, ::2] = 127.0
    weights = _sworker.IntegerWeights(codes, np.ones(num_columns, np.float32), None, 1, 1)
    sums = np.empty((num_rows, num_columns), np.int32)
    weights.add_up(rows, np.full(num_rows, 127.0, np.float32), sums, "none", isa, 1)
    # float64 holds these integers exactly
    return bool((sums == rows.astype(np.float64) @ codes.T.astype(np.float64)).all())


def activation_of(gated: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> str:
    """Return the name of the kernels' activation that computes the same as ``gated``; "" if none does.

    ``gated`` maps rows [n, 2], a gate and a value, to [n, 1]. It has no matrix product, so ranks find the same name.
    """
    pairs = torch.randn(256, 2, generator=torch.Generator()) * torch.tensor([4.0, 1.0])
    rows = torch.stack((pairs[:, 0], pairs[:, 1].abs()), -1).to(dtype)
    try:
        wanted = gated(rows).reshape(-1).abs()
    except (AttributeError, RuntimeError, TypeError, ValueError):  # ``gated`` is no activation of a gate and a value
        return ""
    x, found = as_rows(rows), torch.empty(len(rows))
    one = _sworker.IntegerWeights(np.ones((1, 1), np.int8), np.ones(1, np.float32), None, 1, 1)
    for activation in ACTIVATIONS:
        # ``find_peaks`` returns each row's largest magnitude, which for one element is the activation's magnitude
        one.find_peaks(array(x), found.numpy(), activation, integer_isa(), 1)
        if equal_within_rounding(found.to(dtype), wanted):
            return activation
    return ""


def mostly_equal(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Return whether at least three rows in four differ only by rounding.

    A value that rounds differently may quantize to the next int8 number. So a few rows may differ by more.
    """
    pairs = zip(found.flatten(0, -2), wanted.flatten(0, -2), strict=True)
    equal = [equal_within_rounding(*pair) for pair in pairs]
    return sum(equal) * 4 >= len(equal) * 3


def as_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return ``rows`` [..., width] as contiguous [rows, width], in float32 if the kernels lack their dtype."""
    flat = rows.reshape(-1, rows.shape[-1]).contiguous()
    return flat if flat.dtype in (torch.float32, torch.bfloat16) else flat.float()


def array(rows: torch.Tensor) -> Any:
    """Return a contiguous tensor's memory as a numpy array; bfloat16 as its bits."""
    return (rows.view(torch.uint16) if rows.dtype == torch.bfloat16 else rows).numpy()
