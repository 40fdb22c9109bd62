"""Linear layers with their weights packed once, where torch would pack them at every call (CPU only).

The model's code is untouched: each ``nn.Linear`` gets a ``forward`` of its own. Its weight stays where it is, for code
that reads it and for the shapes where torch's own product is faster, so packing costs the linear weights' memory again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

PACKED_ROWS = 128
"""Up to here the packed product is faster (measured 1.1 to 1.9 times in float32); above, packing pays for itself."""

ROWS_HINT = 64
"""Rows the packed layout is chosen for."""


def prepack_linears(model: torch.nn.Module) -> int:
    """Pack every plain ``nn.Linear`` of a model on the CPU; returns how many. No effect on other devices."""
    if not torch.backends.mkldnn.is_available():
        return 0
    linears = [module for module in model.modules() if type(module) is torch.nn.Linear]
    on_cpu = [linear for linear in linears if linear.weight.device.type == "cpu"]
    for linear in on_cpu:
        linear.__dict__["forward"] = _packed_forward(linear)
    return len(on_cpu)


def has_fast_products(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies matrices of ``dtype`` at full speed; otherwise float32 is several times faster."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True


def _packed_forward(linear: torch.nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
    """The layer's product over packed weights: in its own dtype, or in float32 where the CPU has only that."""
    native = has_fast_products(linear.weight.dtype)
    dtype = linear.weight.dtype if native else torch.float32
    packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.data.to(dtype).contiguous(), ROWS_HINT)
    bias = None if linear.bias is None else linear.bias.data.to(dtype)

    def forward(rows: torch.Tensor) -> torch.Tensor:
        num_rows = rows.numel() // rows.shape[-1]
        if num_rows == 0 or (native and num_rows > PACKED_ROWS):
            return F.linear(rows, linear.weight, linear.bias)
        product = torch.ops.mkldnn._linear_pointwise(rows.to(dtype).contiguous(), packed, bias, "none", [], "")
        return product.to(rows.dtype)

    return forward
