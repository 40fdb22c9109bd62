"""Staging of a model on a GPU: pinned buffers, copy streams and events. The thread never waits for the GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch

from fastdecode.core.protocols import AttentionBackend
from fastdecode.sworker.run.staging import from_numpy, to_numpy

SPIN_POLLS = 300
"""Consecutive polls before an idle S-worker sleeps between polls: some hundred microseconds."""

SLEEP_SECONDS = 30e-6
"""Seconds that an idle S-worker sleeps between two polls."""


class CudaDevice:
    """The part of ``torch.cuda`` that :class:`CudaStaging` uses. Tests replace it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def stream(self) -> Any:
        """Return a new stream, separate from the compute stream."""
        return torch.cuda.Stream(self.device)

    def compute_stream(self) -> Any:
        """Return the stream that the model runs on."""
        return torch.cuda.current_stream(self.device)

    def event(self, timing: bool = False) -> Any:
        return torch.cuda.Event(enable_timing=timing)

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor of ``count`` elements on the device, allocated on the compute stream."""
        return torch.empty(count, dtype=dtype, device=self.device)

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor of ``count`` elements in page-locked host memory."""
        return torch.empty(count, dtype=dtype, pin_memory=True)

    def is_pinned(self, host: torch.Tensor) -> bool:
        return host.is_pinned()

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        """Queue a copy on ``stream``.

        Both tensors are contiguous and the one on the host is pinned, so the copy is one DMA transfer.
        """
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)


class CudaStaging:
    """Staging of a model on a GPU: pinned buffers, and one stream for copies to the host (down), one for copies up.

    With two mini-batches, per layer::

        compute  │ A │ B │ A │ B │ …        every forward, on the current stream
        down         │q,k,v│                 after A's `computed` event, beside B's kernels
        host               submit … ready    once A's `sent` event is seen
        up                           │ o │   the compute stream waits for A's `arrived` event, the thread does not
    """

    def __init__(self, backend: AttentionBackend, gpu: CudaDevice) -> None:
        self._backend = backend
        self._gpu = gpu
        self._streams = gpu.stream(), gpu.stream()
        self._stopwatch = _Stopwatch(gpu)
        self._transfers: dict[int, _Transfer] = {}

    def begin_step(self) -> None:
        self._stopwatch.restart()
        for transfer in self._transfers.values():
            transfer.phase = Phase.IDLE

    def send(self, mini_batch: int, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """See ``Staging.send``. First submit rows of other mini-batches that have reached the host."""
        for transfer in self._transfers.values():
            transfer.poll()
        if mini_batch not in self._transfers:
            self._transfers[mini_batch] = _Transfer(mini_batch, self._backend, self._gpu, *self._streams)
        self._transfers[mini_batch].send(layer, q, k, v)

    def next_ready(self, mini_batches: Sequence[int]) -> int:
        """See ``Staging.next_ready``. Poll all ``mini_batches``, and submit the rows that have reached the host."""
        polls = 0
        while not (ready := [each for each in mini_batches if self._transfers[each].poll()]):
            polls += 1
            if polls > SPIN_POLLS:
                time.sleep(SLEEP_SECONDS)
        return ready[0]

    def collect(self, mini_batch: int) -> torch.Tensor:
        """See ``Staging.collect``. The compute stream waits until o is copied, so later work on it may read o."""
        return self._transfers[mini_batch].receive()

    def mark(self) -> None:
        self._stopwatch.mark()

    def device_seconds(self) -> float | None:
        """See ``Staging.device_seconds``. Call this at the end of a step, since it waits for the last mark."""
        return self._stopwatch.seconds()


class Phase(Enum):
    """The stages of a mini-batch's rows on their way between the device and the R-workers."""

    IDLE = "the model computes"
    SENDING = "on their way down to the host"
    ATTENDING = "with the backend"
    READY = "o can be collected"


class _Transfer:
    """One mini-batch's buffers, events and phase.

    A buffer keeps its address as long as the rows fit, so that CUDA graphs can be captured between attention calls. No
    buffer needs ``record_stream``. A send begins only after the compute stream was told to wait for the previous o.
    That o's copy up was queued only after the previous send had ended. So no stream still uses memory that a send
    overwrites. (Late copies of an abandoned step are not read.)
    """

    def __init__(self, mini_batch: int, backend: AttentionBackend, gpu: CudaDevice, down: Any, up: Any) -> None:
        self.phase = Phase.IDLE
        self._mini_batch, self._layer, self._dtype = mini_batch, 0, torch.float32
        self._backend, self._gpu, self._down, self._up = backend, gpu, down, up
        self._computed, self._sent, self._arrived = gpu.event(), gpu.event(), gpu.event()
        self._qkv, self._o = _Buffer(gpu.empty), _Buffer(gpu.empty)
        self._pinned_qkv, self._pinned_o = _Buffer(gpu.pinned), _Buffer(gpu.pinned)
        self._rows: list[torch.Tensor] = []

    def send(self, layer: int, *qkv: torch.Tensor) -> None:
        """Gather q, k and v in one buffer on the device, and queue a copy of this buffer to the host."""
        self._layer, self._dtype = layer, qkv[0].dtype
        shapes = [rows.shape for rows in qkv]
        sizes = [rows.numel() for rows in qkv]
        gathered = self._qkv.room(sum(sizes), self._dtype)
        landing = self._pinned_qkv.room(sum(sizes), self._dtype)
        # o's buffer is made before `computed` is recorded: otherwise the stream that copies o up might write memory
        # that the compute stream still reads. A row of o is as wide as a row of v. If no v is sent, k contains the
        # values and is as wide.
        self._o.room(shapes[0][0] * shapes[0][1] * (shapes[2][2] or shapes[1][2]), self._dtype)
        for part, rows in zip(gathered.split(sizes), qkv, strict=True):
            part.view(rows.shape).copy_(rows)
        self._computed.record(self._gpu.compute_stream())
        self._down.wait_event(self._computed)
        self._gpu.copy(landing, gathered, self._down)
        self._sent.record(self._down)
        self._rows = [part.view(shape) for part, shape in zip(landing.split(sizes), shapes, strict=True)]
        self.phase = Phase.SENDING

    def poll(self) -> bool:
        """Submit the rows if they have reached the host; return whether o can be collected."""
        if self.phase is Phase.SENDING and self._sent.query():
            self._backend.submit(self._mini_batch, self._layer, *map(to_numpy, self._rows))
            self.phase = Phase.ATTENDING
        if self.phase is Phase.ATTENDING and self._backend.ready(self._mini_batch):
            self.phase = Phase.READY
        return self.phase is Phase.READY

    def receive(self) -> torch.Tensor:
        """Queue the copy of o to the device. The compute stream waits for the copy; the thread does not."""
        o = from_numpy(self._backend.collect(self._mini_batch), self._dtype)
        if not self._gpu.is_pinned(o):
            o = self._pinned_o.room(o.numel(), self._dtype).view(o.shape).copy_(o)
        arriving = self._o.room(o.numel(), self._dtype).view(o.shape)
        self._gpu.copy(arriving, o, self._up)
        self._arrived.record(self._up)
        self._gpu.compute_stream().wait_event(self._arrived)
        self.phase = Phase.IDLE
        return arriving


class _Buffer:
    """A flat tensor that grows when needed and otherwise keeps its address."""

    def __init__(self, allocate: Callable[[int, torch.dtype], torch.Tensor]) -> None:
        self._allocate = allocate
        self._memory = torch.empty(0)

    def room(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the buffer's first ``count`` elements. A buffer that grows loses its content."""
        if len(self._memory) < count or self._memory.dtype != dtype:
            self._memory = self._allocate(max(count, 2 * len(self._memory)), dtype)
        return self._memory[:count]


class _Stopwatch:
    """Measures the device's time between pairs of marks on the compute stream; it is read only once per step."""

    def __init__(self, gpu: CudaDevice) -> None:
        self._gpu = gpu
        self._events: list[Any] = []
        self._count = 0

    def restart(self) -> None:
        self._count = 0

    def mark(self) -> None:
        if self._count == len(self._events):
            self._events.append(self._gpu.event(timing=True))
        self._events[self._count].record(self._gpu.compute_stream())
        self._count += 1

    def seconds(self) -> float:
        """Return the sum of the times between first and second marks since ``restart``; wait for the last mark."""
        marks = self._events[: self._count]
        if marks:
            marks[-1].synchronize()
        return sum(start.elapsed_time(stop) for start, stop in zip(marks[::2], marks[1::2], strict=True)) / 1e3
