"""A stand-in for the weight of a linear layer that keeps only packed weights and frees the original."""

from __future__ import annotations

import bisect
import ctypes
import logging
import mmap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

FACTS = ["shape", "dtype", "layout", "ndim", "requires_grad", "is_leaf", "grad", "grad_fn"]
METHODS = ["size", "dim", "numel", "nelement", "stride", "element_size", "is_contiguous", "is_floating_point"]
METHODS += ["requires_grad_", "__len__", "__hash__"]

ABOUT_ITSELF = {getattr(torch.Tensor, name).__get__ for name in FACTS} | {
    getattr(torch.Tensor, name) for name in METHODS
}
"""Tensor attributes that the stand-in answers without unpacking values."""

IS_FALSE = {getattr(torch.Tensor, name).__get__ for name in ("is_meta", "is_cuda")}
"""Attributes that are false, since the stand-in represents a tensor on the CPU."""


class PackedWeight(torch.nn.Parameter):
    """A parameter on the CPU with shape and dtype but without memory. Reading its values unpacks them.

    So model code that uses a layer's weight directly stays right, but is slow: each use unpacks the weight.
    """

    _unpack: Callable[[], torch.Tensor]

    @classmethod
    def of(cls, weight: torch.Tensor, unpack: Callable[[], torch.Tensor]) -> PackedWeight:
        """Return a stand-in for ``weight``. ``unpack`` returns its values, equal bit by bit."""
        packed: PackedWeight = torch.Tensor._make_subclass(
            cls, torch.empty(weight.shape, dtype=weight.dtype, device="meta"), False
        )
        packed._unpack = unpack
        return packed

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        """Return an ordinary parameter with a copy of the unpacked values."""
        return torch.nn.Parameter(self._unpack(), requires_grad=False)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Handle every use of the parameter, before torch reads its memory."""
        device = getattr(torch.Tensor, "device").__get__  # noqa: B009 (as a descriptor; type checkers see the value)
        with torch._C.DisableTorchFunctionSubclass():
            if func == device:
                return torch.device("cpu")
            if func in IS_FALSE:
                return False
            if func in ABOUT_ITSELF:
                return func(*args, **(kwargs or {}))
            logger.debug("%s unpacks a packed weight", getattr(func, "__name__", func))
            return func(*map(_unpacked, args), **{name: _unpacked(value) for name, value in (kwargs or {}).items()})


def _unpacked(value: Any) -> Any:
    """Return ``value`` with every packed weight in it unpacked."""
    if isinstance(value, PackedWeight):
        return value._unpack()
    if isinstance(value, list | tuple):
        return type(value)(map(_unpacked, value))
    return value


class FileMaps:
    """The file mappings that this process has at construction, among them safetensors' mappings of checkpoints.

    A file stays mapped as long as one of its tensors exists. Pages that were read count as this process's memory until
    they are given back to the system. The page cache still holds them, so no data is lost.
    """

    def __init__(self, unwritten: bool = False) -> None:
        """``unwritten``: skip mappings with pages that this process has written, which could not be read again."""
        self._ranges: list[tuple[int, int]] = []
        maps, is_file = Path("/proc/self/smaps" if unwritten else "/proc/self/maps"), False
        for line in maps.read_text(encoding="utf-8").splitlines() if maps.exists() else ():
            first, *rest = line.split(maxsplit=5)
            if not first.endswith(":"):
                # Inode 0 means no file. Libraries are skipped: other threads may write their variables at any time.
                is_file = rest[3] != "0" and not (unwritten and ".so" in rest[-1])
                if is_file:
                    start, end = (int(address, 16) for address in first.split("-"))
                    self._ranges.append((start, end))
            elif is_file and first == "Anonymous:" and rest[0] != "0":
                self._ranges.pop()
        self._ranges.sort()

    def let_go(self, tensor: torch.Tensor) -> bool:
        """Give back the whole pages of ``tensor``; return False if no file backs them.

        Written pages of a private mapping are lost. So ``tensor`` must never have been written, or never be read again.
        """
        start = tensor.data_ptr()
        end = start + tensor.numel() * tensor.element_size()
        index = bisect.bisect_right(self._ranges, (start, 1 << 64)) - 1
        if not tensor.is_contiguous() or index < 0 or end > self._ranges[index][1]:
            return False
        return _give_back(start, end)

    def let_all_go(self) -> None:
        """Give back all pages of the mappings, which must be unwritten. Later reads come from the files again."""
        for start, end in self._ranges:
            _give_back(start, end)


def _give_back(start: int, end: int) -> bool:
    """Let the system drop the whole pages from ``start`` to ``end``; later reads come from their file."""
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    size = end // mmap.PAGESIZE * mmap.PAGESIZE - first
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return size > 0 and madvise(first, size, mmap.MADV_DONTNEED) == 0
