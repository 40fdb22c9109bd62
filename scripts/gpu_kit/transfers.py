"""Part c: times the copies of a layer's rows to the host and back (pinned memory), for one and two mini-batches."""

from __future__ import annotations

import statistics
import time

import torch

from fastdecode.sworker.run.cuda_staging import CudaDevice
from gpu_kit.rows import Part, part_of_arguments

SIZES = tuple(1 << power for power in range(16, 25, 2))
"""Sizes of 64 KiB to 16 MiB."""


def main() -> None:
    part = part_of_arguments()
    repeats = 10 if part.quick else 50
    for size in SIZES[:: 2 if part.quick else 1]:
        for lanes in (1, 2):
            name = f"{size >> 10} KiB there and back, {lanes} mini-batch{'es' * (lanes > 1)}"
            part.tried(name, lambda size=size, lanes=lanes, name=name: add(part, name, size, lanes, repeats))


def add(part: Part, name: str, size: int, lanes: int, repeats: int) -> None:
    """Add the median time of one round trip of ``size`` bytes, and its rate. ``lanes``: mini-batches that alternate."""
    ways = [Way(size, part.on_gpu) for _ in range(lanes)]
    seconds = []
    for _ in range(repeats + 3):
        start = time.perf_counter()
        for way in ways:
            way.begin()
        for way in ways:
            way.answer()
        for way in ways:
            way.end()
        seconds.append((time.perf_counter() - start) / lanes)
    median = statistics.median(seconds[3:])
    note = f"{2 * size / median / 1e9:.2f} GB/s both ways" + ("" if part.on_gpu else "; copies in memory, no GPU")
    part.add(name, round(median * 1e6, 1), "us per mini-batch", note)


class Way:
    """The buffers and streams of one mini-batch. The host sends back unchanged what it received."""

    def __init__(self, size: int, on_gpu: bool) -> None:
        self._gpu = CudaDevice(torch.device("cuda", torch.cuda.current_device())) if on_gpu else None
        if self._gpu:
            self._device = self._gpu.empty(size, torch.uint8)
            self._host = self._gpu.pinned(size, torch.uint8)
            self._down, self._up = self._gpu.stream(), self._gpu.stream()
            self._sent, self._arrived = self._gpu.event(), self._gpu.event()
        else:
            self._device, self._host = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)

    def begin(self) -> None:
        """Start the copy to the host."""
        if not self._gpu:
            self._host.copy_(self._device)
            return
        self._gpu.copy(self._host, self._device, self._down)
        self._sent.record(self._down)

    def answer(self) -> None:
        """Wait for the copy to the host, and start the copy back."""
        if not self._gpu:
            self._device.copy_(self._host)
            return
        while not self._sent.query():
            pass
        self._gpu.copy(self._device, self._host, self._up)
        self._arrived.record(self._up)

    def end(self) -> None:
        """Wait until the copy back is done."""
        while self._gpu and not self._arrived.query():
            pass


if __name__ == "__main__":
    main()
