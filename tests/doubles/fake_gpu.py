"""A stand-in for ``torch.cuda`` on CPU tensors. Copies happen late; until then their target holds NaN."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from fastdecode.sworker.run.cuda_staging import CudaStaging


class FakeStream:
    """A stream of work in order. The compute stream works at once, the others when an event is awaited."""

    def __init__(self, gpu: FakeGpu, name: str) -> None:
        self.gpu, self.name = gpu, name
        self.work: deque[Callable[[], object]] = deque()
        self.queued = self.done = 0

    def add(self, work: Callable[[], object]) -> None:
        self.work.append(work)
        self.queued += 1
        if self.name == "compute":
            self.run_to(self.queued)

    def run_to(self, count: int) -> None:
        while self.done < count:
            self.work.popleft()()
            self.done += 1

    def wait_event(self, event: FakeEvent) -> None:
        stream, count = event.recorded()
        self.gpu.log.append(f"{self.name} waits for {stream.name}")
        self.add(lambda: stream.run_to(count))


class FakeEvent:
    """An event that has happened once it was asked ``polls`` times after it was recorded."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu, self.stream, self.count = gpu, gpu.compute, -1

    def recorded(self) -> tuple[FakeStream, int]:
        assert self.count >= 0, "an event that was never recorded"
        return self.stream, self.count

    def record(self, stream: FakeStream) -> None:
        self.stream, self.count, self.asked = stream, stream.queued, 0
        self.gpu.now += 1.0
        self.milliseconds = self.gpu.now
        self.polls = self.gpu.polls.popleft() if stream.name == "down" and self.gpu.polls else self.gpu.default_polls

    def query(self) -> bool:
        self.asked += 1
        if self.asked > self.polls:
            self.stream.run_to(self.count)
        return self.stream.done >= self.count

    def synchronize(self) -> None:
        self.gpu.synchronised += 1

    def elapsed_time(self, end: FakeEvent) -> float:
        return (end.milliseconds - self.milliseconds) * self.gpu.scale


@dataclass
class FakeGpu:
    """Replaces ``cuda_staging.Gpu``. ``polls``: how late each of the first copies to the host is."""

    polls: deque[int] = field(default_factory=deque)
    default_polls: int = 0
    pins_everything: bool = False
    scale: float = 1.0
    now: float = 0.0
    synchronised: int = 0
    log: list[str] = field(default_factory=list)
    allocated: list[tuple[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.compute = FakeStream(self, "compute")
        self.names = deque(["down", "up"])

    def stream(self) -> FakeStream:
        return FakeStream(self, self.names.popleft())

    def compute_stream(self) -> FakeStream:
        return self.compute

    def event(self, timing: bool = False) -> FakeEvent:
        return FakeEvent(self)

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        self.allocated.append(("device", count))
        return torch.full((count,), torch.nan, dtype=dtype)

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        self.allocated.append(("pinned", count))
        return torch.full((count,), torch.nan, dtype=dtype)

    def is_pinned(self, host: torch.Tensor) -> bool:
        return self.pins_everything

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: FakeStream) -> None:
        assert target.is_contiguous() and source.is_contiguous() and target.shape == source.shape
        self.log.append(f"copy {stream.name}")
        target.fill_(torch.nan)  # memory must not be read before the copy has run
        stream.add(lambda: target.copy_(source))


def staging_of(gpu: FakeGpu, backend: Any) -> CudaStaging:
    return CudaStaging(backend, gpu)  # type: ignore[arg-type]
