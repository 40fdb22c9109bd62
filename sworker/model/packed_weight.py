"""A stand-in for the weight of a linear layer that keeps only packed weights and frees the original."""

from __future__ import annotations

import bisect
import ctypes
import logging
import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    sample: torch.Tensor | None = None
    """Some numbers of a weight that was never whole in memory; see ``Sample``."""

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


class Sample:
    """Takes some evenly spaced numbers of a weight that may come in parts. They identify a checkpoint."""

    def __init__(self, size: int) -> None:
        """``size``: the numbers in the whole weight."""
        most = 64  # numbers of each weight that are taken
        self._step, self._start, self._left = max(1, size // most), 0, most

    def of(self, part: torch.Tensor) -> torch.Tensor:
        """Return the numbers that are taken from the next ``part`` of the weight."""
        numbers = part.detach().reshape(-1)
        found = numbers[-self._start % self._step :: self._step][: self._left].clone()
        self._start, self._left = self._start + len(numbers), self._left - len(found)
        return found


def _unpacked(value: Any) -> Any:
    """Return ``value`` with every packed weight in it unpacked."""
    if isinstance(value, PackedWeight):
        return value._unpack()
    if isinstance(value, list | tuple):
        return type(value)(map(_unpacked, value))
    return value


class FileMaps:
    """The mappings of ordinary files in this process at construction, through which safetensors maps checkpoints.

    A mapped file stays as long as one of its tensors. Pages that were read count as this process's memory until they
    are given back. They stay in the page cache, so nothing is lost. Rings of io_uring and devices count as no files:
    a page of theirs that was given back raises SIGBUS at its next use.
    """

    def __init__(self, unwritten: bool = False) -> None:
        """``unwritten``: only the mappings of which this process has written no page, so that all can be read again."""
        self._ranges: list[tuple[int, int]] = []
        maps, is_file = Path("/proc/self/smaps" if unwritten else "/proc/self/maps"), False
        for line in maps.read_text(encoding="utf-8").splitlines() if maps.exists() else ():
            first, *rest = line.split(maxsplit=5)
            if not first.endswith(":"):
                is_file = rest[-1].startswith("/") and Path(rest[-1]).is_file()
                if is_file:
                    start, end = (int(address, 16) for address in first.split("-"))
                    self._ranges.append((start, end))
            elif is_file and first in ("Anonymous:", "Swap:", "Private_Hugetlb:") and rest[0] != "0":
                self._ranges.pop()
                is_file = False
        self._ranges.sort()

    def let_go(self, tensor: torch.Tensor) -> bool:
        """Give back the whole pages of ``tensor``; return False if no file backs them.

        Written pages of a private mapping are lost. So the tensor is never read again, or was never written.
        """
        start, within = tensor.data_ptr(), self._range_of(tensor)
        end = start + tensor.numel() * tensor.element_size()
        is_mapped = tensor.is_contiguous() and within is not None and end <= within[1]
        return is_mapped and _give_back(start, end)

    def let_all_go(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give back all pages of each mapping with one of ``tensors``. These mappings must be unwritten."""
        mapped = {self._range_of(each) for each in tensors if not isinstance(each, PackedWeight)}
        for start, end in filter(None, mapped):
            _give_back(start, end)

    def _range_of(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """Return the mapping in which ``tensor`` begins; None if it begins in none."""
        start = tensor.data_ptr()
        index = bisect.bisect_right(self._ranges, (start, 1 << 64)) - 1
        return self._ranges[index] if index >= 0 and start < self._ranges[index][1] else None


def _give_back(start: int, end: int) -> bool:
    """Tell the system that the whole pages from ``start`` to ``end`` may be read from their file again."""
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    size = end // mmap.PAGESIZE * mmap.PAGESIZE - first
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return size > 0 and madvise(first, size, mmap.MADV_DONTNEED) == 0
