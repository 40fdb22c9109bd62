"""Pages of checkpoint files that are mapped into memory, and no longer needed."""

from __future__ import annotations

import bisect
import ctypes
import mmap
from pathlib import Path

import torch


class FileMaps:
    """The file mappings of this process when it was made, as safetensors maps checkpoints.

    A mapped file stays as long as one of its tensors does; pages that were read count as this process's memory until
    they are given back. They are still in the system's page cache then, so nothing is lost.
    """

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []
        maps = Path("/proc/self/maps")
        for line in maps.read_text().splitlines() if maps.exists() else ():
            addresses, _, _, _, inode, *_ = line.split(maxsplit=5)
            if inode != "0":
                start, end = (int(address, 16) for address in addresses.split("-"))
                self._ranges.append((start, end))
        self._ranges.sort()

    def let_go(self, tensor: torch.Tensor) -> bool:
        """Give back the whole pages of ``tensor``, which is never read again; False where no file backs them.

        The pages of a private mapping that were written would be lost, which is why only checkpoints qualify.
        """
        start = tensor.data_ptr()
        end = start + tensor.numel() * tensor.element_size()
        index = bisect.bisect_right(self._ranges, (start, 1 << 64)) - 1
        if not tensor.is_contiguous() or index < 0 or end > self._ranges[index][1]:
            return False
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        size = end // mmap.PAGESIZE * mmap.PAGESIZE - first
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        return size > 0 and madvise(first, size, mmap.MADV_DONTNEED) == 0
