"""A parameter that stands in for a linear layer's weight once only the packed weight is in memory."""

from __future__ import annotations

import bisect
import ctypes
import functools
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

    Model code that uses a layer's weight directly thus stays correct, but is slow: each use unpacks the weight.
    """

    _unpack: Callable[[], torch.Tensor]
    sample: torch.Tensor | None = None
    """Some numbers of a weight that was never whole in memory; see ``Sample``."""

    @classmethod
    def of(cls, weight: torch.Tensor, unpack: Callable[[], torch.Tensor]) -> PackedWeight:
        """Return a stand-in for ``weight``. ``unpack`` returns the values of ``weight``, bit by bit."""
        packed: PackedWeight = torch.Tensor._make_subclass(
            cls, torch.empty(weight.shape, dtype=weight.dtype, device="meta"), False
        )
        packed._unpack = unpack
        return packed

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        """Return an ordinary parameter that holds the unpacked values."""
        return torch.nn.Parameter(self._unpack(), requires_grad=False)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute ``func`` on the unpacked values, unless it only asks for the parameter's shape, dtype or the like."""
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
    if isinstance(value, PackedWeight):
        return value._unpack()
    if isinstance(value, list | tuple):
        return type(value)(map(_unpacked, value))
    return value


class FileMaps:
    """The files mapped into this process at construction, as safetensors maps checkpoints.

    A mapping lives as long as any of its tensors. Its pages, once read, count as this process's memory. Giving pages
    back lowers that count and loses nothing, since the page cache keeps them. Mappings of devices and of io_uring are
    left out: using their pages after giving them back raises SIGBUS.
    """

    def __init__(self, unwritten: bool = False) -> None:
        """``unwritten``: record only mappings without written pages, since only their pages can be read again."""
        self._ranges: list[tuple[int, int]] = []
        maps, is_file = Path("/proc/self/smaps" if unwritten else "/proc/self/maps"), False
        is_ordinary = functools.cache(lambda name: name.startswith("/") and Path(name).is_file())
        for line in maps.read_text(encoding="utf-8").splitlines() if maps.exists() else ():
            first, *rest = line.split(maxsplit=5)
            if not first.endswith(":"):
                is_file = is_ordinary(rest[-1])
                if is_file:
                    start, end = (int(address, 16) for address in first.split("-"))
                    self._ranges.append((start, end))
            elif is_file and first in ("Anonymous:", "Swap:", "Private_Hugetlb:") and rest[0] != "0":
                self._ranges.pop()
                is_file = False
        self._ranges.sort()

    def let_go(self, tensor: torch.Tensor) -> bool:
        """Give the whole pages of ``tensor`` back to the system; return False if no file backs them.

        Pages written since they were mapped lose their content: call this only if none was, or if nobody reads them
        again.
        """
        start, within = tensor.data_ptr(), self._range_of(tensor)
        end = start + tensor.numel() * tensor.element_size()
        is_mapped = tensor.is_contiguous() and within is not None and end <= within[1]
        return is_mapped and _give_back(start, end)

    def let_all_go(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give back all pages of each mapping that holds one of ``tensors``. Nothing may have been written to them."""
        mapped = {self._range_of(each) for each in tensors if not isinstance(each, PackedWeight)}
        for start, end in filter(None, mapped):
            _give_back(start, end)

    def _range_of(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        start = tensor.data_ptr()
        index = bisect.bisect_right(self._ranges, (start, 1 << 64)) - 1
        return self._ranges[index] if index >= 0 and start < self._ranges[index][1] else None


def _give_back(start: int, end: int) -> bool:
    """Let the system take back the whole pages between ``start`` and ``end``; later reads load them from the file."""
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    size = end // mmap.PAGESIZE * mmap.PAGESIZE - first
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return size > 0 and madvise(first, size, mmap.MADV_DONTNEED) == 0
