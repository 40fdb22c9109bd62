"""Replaces layers of a vLLM module on CPUs that compute wrongly there, or in a dozen passes where one is enough."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fastdecode import _sworker
from fastdecode.sworker.model.fused import DTYPES
from fastdecode.sworker.model.prepack import PROOF_ROWS, equal_within_rounding
from fastdecode.sworker.run.staging import to_numpy


def rotate_by_heads(module: torch.nn.Module) -> None:
    """On CPUs, let rotary embeddings rotate queries [T, heads, dim] by torch: vLLM's CPU kernel is wrong there."""
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

    def rotate(kernel: Any, native: Any, positions: Any, query: torch.Tensor, *rest: Any, **named: Any) -> Any:
        return (kernel if query.ndim == 2 else native)(positions, query, *rest, **named)

    for each in module.modules():
        if isinstance(each, RotaryEmbedding) and each._forward_method == each.forward_cpu:
            each._forward_method = partial(rotate, each.forward_cpu, each.forward_native)


class OnePassNorm:
    """Computes ``layer``, an RMSNorm of vLLM, in one pass over its rows. Rows of another dtype go to ``own``.

    Like vLLM, the layer normalises the sum of rows and residual before the sum is rounded to the rows' dtype.
    """

    def __init__(self, layer: Any, own: Callable[..., Any]) -> None:
        """``own``: the layer's own forward."""
        self._own, self._eps, self._weight = own, float(layer.variance_epsilon), layer.weight.data
        self._float_weight = self._weight.float().numpy()

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """Return ``x`` [..., dim] normalised. With a residual, return their sum normalised, and the sum itself."""
        if x.dtype != self._weight.dtype or (residual is not None and residual.dtype != x.dtype):
            return self._own(x, residual)
        rows = x.reshape(-1, len(self._weight)).contiguous()
        out = torch.empty_like(rows)
        given = to_numpy(rows), self._float_weight, self._eps, True, to_numpy(out), torch.get_num_threads()
        if residual is None:
            _sworker.rms_norm(*given)
            return out.view(x.shape)
        added, total = residual.reshape(rows.shape).contiguous(), torch.empty_like(rows)
        _sworker.rms_norm(*given, residual=to_numpy(added), total=to_numpy(total))
        return out.view(x.shape), total.view(x.shape)

    def proves_equal(self) -> bool:
        """Return whether random rows get the layer's own result, with a residual and without one."""
        shape = 2, PROOF_ROWS, len(self._weight)
        rows, residual = torch.randn(shape, generator=torch.Generator()).to(self._weight.dtype)
        pairs = [(self(rows), self._own(rows.clone(), None))]
        pairs += zip(self(rows, residual), self._own(rows.clone(), residual.clone()), strict=True)
        return all(equal_within_rounding(found, wanted) for found, wanted in pairs)


def norm_in_one_pass(module: torch.nn.Module) -> None:
    """Make each RMSNorm of vLLM on the CPU compute in one pass, if that proves equal to vLLM's own dozen passes."""
    from vllm.model_executor.layers.layernorm import RMSNorm

    each: Any
    for each in module.modules():
        if type(each) is not RMSNorm or each._forward_method != each.forward_cpu:
            continue
        is_plain = each.has_weight and each.variance_size_override is None
        if is_plain and each.weight.dtype in DTYPES and each.weight.device.type == "cpu":
            form = OnePassNorm(each, each.forward_cpu)
            if form.proves_equal():
                each._forward_method = form
