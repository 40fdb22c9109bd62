"""What stands for a linear layer's weight once only its packed form is kept."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

logger = logging.getLogger(__name__)

FACTS = ["shape", "dtype", "layout", "ndim", "requires_grad", "is_leaf", "grad", "grad_fn"]
METHODS = ["size", "dim", "numel", "nelement", "stride", "element_size", "is_contiguous", "is_floating_point"]
METHODS += ["requires_grad_", "__len__", "__hash__"]

ABOUT_ITSELF = {getattr(torch.Tensor, name).__get__ for name in FACTS} | {
    getattr(torch.Tensor, name) for name in METHODS
}
"""What can be answered without the values."""

IS_FALSE = {getattr(torch.Tensor, name).__get__ for name in ("is_meta", "is_cuda")}
"""The tensor underneath has no memory; what it stands for is on the CPU."""

DEVICE = getattr(torch.Tensor, "device").__get__  # noqa: B009 (as a descriptor; type checkers see the value)


class PackedWeight(torch.nn.Parameter):
    """A parameter of known shape and dtype, on the CPU, without memory: whatever reads its values has them unpacked.

    So the model's code stays right where it uses a layer's weight itself, only slow: it is unpacked at every use.
    """

    _unpack: Callable[[], torch.Tensor]

    @classmethod
    def of(cls, weight: torch.Tensor, unpack: Callable[[], torch.Tensor]) -> PackedWeight:
        """In the place of ``weight``; ``unpack`` returns its values, equal bit by bit."""
        packed: PackedWeight = torch.Tensor._make_subclass(cls, torch.empty_like(weight, device="meta"), False)
        packed._unpack = unpack
        return packed

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        """A parameter with values of its own."""
        return torch.nn.Parameter(self._unpack(), requires_grad=False)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Every use of the parameter comes here, before torch looks at its memory."""
        with torch._C.DisableTorchFunctionSubclass():
            if func == DEVICE:
                return torch.device("cpu")
            if func in IS_FALSE:
                return False
            if func in ABOUT_ITSELF:
                return func(*args, **(kwargs or {}))
            logger.debug("%s unpacks a packed weight", getattr(func, "__name__", func))
            return func(*map(_unpacked, args), **{name: _unpacked(value) for name, value in (kwargs or {}).items()})


def _unpacked(value: Any) -> Any:
    """``value`` with every packed weight in it unpacked."""
    if isinstance(value, PackedWeight):
        return value._unpack()
    if isinstance(value, list | tuple):
        return type(value)(map(_unpacked, value))
    return value
