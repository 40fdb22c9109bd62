"""Lets ranks on one machine exchange tensors of layers through shared memory, in tens of microseconds.

Every exchange has a number. A rank writes its data into its slot, and then the number beside it. Once all ranks have
written the number, all data is there. Two sets of slots alternate. A rank that writes number n + 2 has seen number
n + 1 from all ranks, so all have read exchange n. Stores must be seen in order, as on x86; elsewhere ranks use gloo.
"""

from __future__ import annotations

import mmap
import os
import platform
import secrets
import select
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

FOLDER = Path("/dev/shm")
SLOT_BYTES = 4 << 20
FLAG_WORDS = 16
"""Distance in int64 words between two ranks' exchange numbers, so that they share no cache line."""


class SharedMemory:
    """A file of shared memory that all ranks open. In the rank that made it, ``close`` also removes its name."""

    def __init__(self, file: int, path: str, is_own: bool) -> None:
        self.file, self.path, self._is_own = file, path, is_own

    @staticmethod
    def make(size: int) -> SharedMemory | None:
        """Return memory for ``size`` ranks; None if there is no room for it, or if this CPU may reorder stores."""
        if platform.machine() not in ("x86_64", "AMD64") or not hasattr(os, "pidfd_open"):
            return None
        path = FOLDER / f"fastdecode-ranks-{secrets.token_hex(8)}"
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError:
            return None
        memory = SharedMemory(file, str(path), True)
        try:
            os.posix_fallocate(file, 0, num_bytes(size))
        except OSError:
            memory.close()
            return None
        return memory

    @staticmethod
    def find(path: str) -> SharedMemory | None:
        """Open the memory that another rank made at ``path``. Return None if the rank is on another machine."""
        try:
            return SharedMemory(os.open(path, os.O_RDWR | os.O_CLOEXEC), path, False)
        except OSError:
            return None

    def close(self) -> None:
        """Close the file. The memory stays usable where it is mapped."""
        os.close(self.file)
        if self._is_own:
            Path(self.path).unlink(missing_ok=True)


def whereabouts() -> str:
    """Return a text that names this process: its machine, its PID namespace and, as the last word, its process id."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()} {os.getpid()}"


class SharedExchange:
    """Exchanges data among the ranks of one machine."""

    def __init__(self, file: int, index: int, pids: list[int]) -> None:
        """``file``: descriptor of ``num_bytes(size)`` bytes of shared memory; the caller may close it afterwards.

        ``index``: this process's rank. ``pids``: all ranks' process ids.
        """
        self._index, self._size = index, len(pids)
        self._memory = mmap.mmap(file, num_bytes(self._size))
        data = np.frombuffer(self._memory, np.uint8)
        flags = self._size * FLAG_WORDS * 8
        self._flags = data[:flags].view(np.int64)[::FLAG_WORDS]
        self._slots = data[flags:].reshape(2, self._size, SLOT_BYTES)
        self._number = 0
        self._watched = select.poll()
        self._descriptors = [os.pidfd_open(pid) for rank, pid in enumerate(pids) if rank != index]
        for each in self._descriptors:
            self._watched.register(each, select.POLLIN)

    def exchange(self, own: np.ndarray, take: Callable[[slice, np.ndarray], object]) -> None:
        """Send ``own``, uint8 [num_bytes], to all ranks. Its length must be equal on every rank.

        ``take`` is called for each slice of ``own``, with all ranks' bytes in the slice, uint8 [size, length], and must
        copy these bytes. Raise RuntimeError if a rank has ended, or sends nothing in time.
        """
        for start in range(0, len(own), SLOT_BYTES):
            part = slice(start, min(start + SLOT_BYTES, len(own)))
            take(part, self._exchanged(own[part]))

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' contiguous tensors, in place.

        Floats are added in float32 or wider, in the order of ranks. So a row's bits depend neither on its index nor on
        the number of rows. Integers are added exactly.
        """
        data = tensor.view(-1).view(torch.uint8)
        wide = torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype

        def take(part: slice, parts: np.ndarray) -> None:
            first, *others = (torch.from_numpy(each).view(tensor.dtype) for each in parts)
            total = first.to(wide, copy=True)
            for each in others:
                total += each
            data[part].view(tensor.dtype).copy_(total)

        self.exchange(data.numpy(), take)
        return tensor

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return all ranks' tensors in order. The tensors are contiguous and have one shape."""
        found = [torch.empty_like(tensor) for _ in range(self._size)]
        bytes_of = [each.view(-1).view(torch.uint8) for each in found]

        def take(part: slice, parts: np.ndarray) -> None:
            for each, theirs in zip(bytes_of, parts, strict=True):
                each[part] = torch.from_numpy(theirs)

        self.exchange(tensor.view(-1).view(torch.uint8).numpy(), take)
        return found

    def gather_bytes(self, answer: bytes) -> list[bytes]:
        """Send ``answer`` to all ranks; return all ranks' answers in rank order."""
        lengths = [int(each) for each in self.gather(torch.tensor([len(answer)]))]
        padded = torch.frombuffer(bytearray(answer.ljust(max(*lengths, 1), b"\0")), dtype=torch.uint8)
        parts = self.gather(padded)
        return [part[:length].numpy().tobytes() for part, length in zip(parts, lengths, strict=True)]

    def close(self) -> None:
        """Stop watching the other ranks' processes; may be called twice."""
        for each in self._descriptors:
            os.close(each)
        self._descriptors.clear()

    def _exchanged(self, part: np.ndarray) -> np.ndarray:
        self._number += 1
        slots = self._slots[self._number % 2]
        slots[self._index, : len(part)] = part
        self._flags[self._index] = self._number
        self._wait()
        return slots[:, : len(part)]

    def _wait(self) -> None:
        # How many times a waiting rank yields its core before it begins to sleep
        yields = 400
        for _ in range(yields):
            if self._flags.min() >= self._number:
                return
            os.sched_yield()
        silence_seconds = 300.0
        deadline = time.monotonic() + silence_seconds
        sleep_seconds = 2e-5
        # Number of sleeps after which a waiting rank checks that the other ranks' processes live
        look_every = 100
        while True:
            for _ in range(look_every):
                if self._flags.min() >= self._number:
                    return
                time.sleep(sleep_seconds)
            if self._watched.poll(0):
                raise RuntimeError("a rank of this machine has ended")
            if time.monotonic() > deadline:
                raise RuntimeError(f"a rank of this machine has sent nothing for {silence_seconds:.0f} s")


def num_bytes(size: int) -> int:
    """Return the bytes of the memory that ``size`` ranks share."""
    return size * (FLAG_WORDS * 8 + 2 * SLOT_BYTES)
