"""A fuzz target: an R-worker's KV port, to which two peers send frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import atheris
import numpy as np
from kept import BLOCK_SIZE, HOST, LAYOUTS, MOST_FRAMES, NUMBERS, KeptWorker

from fastdecode.cluster.links import port
from fastdecode.cluster.r_worker import kv_port
from fastdecode.cluster.wire import messages
from fastdecode.cluster.wire.frames import HEADER, MAGIC, VERSION, Kind
from fastdecode.core.dtypes import WIRE_DTYPE
from fastdecode.core.errors import FrameError
from fastdecode.core.types import Verb


class FuzzListener:
    """The port's listener without a socket: holds the current message's parts, and records the kinds of the answers."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.answers: list[Kind] = []

    def send_to(self, identity: bytes, parts: Sequence[Any], waits: bool) -> None:
        self.answers.append(Kind(HEADER.unpack(bytes(parts[0]))[2]))

    def read_part(self, num_bytes: int) -> memoryview:
        """Return the next part, which must have ``num_bytes``, as with libzmq."""
        if not self.parts or len(self.parts[0]) != num_bytes:
            raise FrameError("the part has another length")
        return memoryview(self.parts.pop(0))

    def read_into(self, buffer: Any) -> None:
        """Copy the next part into ``buffer``."""
        memoryview(buffer)[:] = self.read_part(memoryview(buffer).nbytes)


class FuzzPort(port.Port):
    """A KV port without a socket or a thread."""

    def __init__(self, handle: port.Handler) -> None:
        self._listener: Any = FuzzListener()
        self.epoch, self._handle, self._open_kinds = 5, handle, frozenset()
        self._reader, self._gate, self._peers, self._logged = port.Reader(self._listener), None, {}, set()

    def send(self, identity: bytes, kind: Kind, *parts: Any, layer: int = 0) -> None:
        """Answer in this thread."""
        self._conversation(identity).send(kind, *parts, layer=layer)

    def take(self, identity: bytes, parts: list[bytes]) -> list[Kind]:
        """Receive a message of the peer ``identity``; return the kinds of the answers."""
        self._listener.parts, self._listener.answers = parts[1:], []
        self._receive(port.PeerChannel(self._listener, identity, parts[0]))
        return list(self._listener.answers)


class KvPortRun:
    """An R-worker's KV port that waits for the rows of some sequences; one sequence has a cached prefix.
    Two peers send frames, most of them correct.
    """

    JOBS = ((1, 0, 40), (2, 0, 17), (3, 0, 1), (4, 19, 40))
    """The jobs: each with its cached tokens, which are a beginning of SOURCE, and its end."""

    SOURCE, SOURCE_TOKENS = 9, 20

    def __init__(self, data: bytes) -> None:
        self._provider = atheris.FuzzedDataProvider(data)
        self._layout = self._provider.PickValueInList(list(LAYOUTS))
        self._worker = KeptWorker.make(self._layout, BLOCK_SIZE, HOST.size)
        self._give_weights()
        self._port = FuzzPort(kv_port.RowStore(self._worker, self._layout))
        self._missing = {
            (job, layer, token)
            for job, begin, end in self.JOBS
            for layer in range(len(self._layout.layers))
            for token in range(begin, end)
        }
        self._numbers = [0, 0]

    def _give_weights(self) -> None:
        """Set the weights of latent layers, without which an R-worker begins no step."""
        for number, layer in enumerate(self._layout.layers):
            if layer.weight_rows:
                shape = layer.num_heads, *layer.weight_rows
                self._worker.set_weights(number, 0, np.zeros(shape, WIRE_DTYPE[self._layout.model_dtype]))

    def run(self) -> None:
        """Check that only frames with missing rows are stored, and that only complete jobs can be committed."""
        data = np.zeros(self.SOURCE_TOKENS * self._layout.kv_bytes_per_token, np.uint8)
        self._worker.import_(self.SOURCE, self.SOURCE_TOKENS, data)
        self._control(*((Verb.FORK, job, self.SOURCE, begin) for job, begin, _ in self.JOBS if begin))
        self._control(*((Verb.RESERVE, job, job, end) for job, _, end in self.JOBS))
        for _ in range(MOST_FRAMES):
            if self._provider.remaining_bytes():
                self._frame()
        for job, _, end in self.JOBS:
            is_whole = not any(missing[0] == job for missing in self._missing)
            try:
                self._control((Verb.COMMIT, job, job, end))
            except ValueError:
                if is_whole:
                    raise
            else:
                if not is_whole:
                    raise RuntimeError("a job was committed although rows are missing")
        self._worker.close()

    def _frame(self) -> None:
        provider = self._provider
        peer, layer = provider.ConsumeIntInRange(0, 1), provider.ConsumeIntInRange(0, 2)
        job, start = provider.ConsumeIntInRange(0, 4), provider.ConsumeIntInRange(0, 40)
        count = provider.PickValueInList([1, 2, 3, 16, 17, 40, 0, -1, 1 << 62])
        if provider.ConsumeIntInRange(0, 15) == 0:
            start = provider.PickValueInList(list(NUMBERS))
        rows = {(job, layer, start + i) for i in range(count if 0 < count < 100 else 0)}
        spec = self._layout.layers[min(layer, len(self._layout.layers) - 1)]
        sizes = [max(0, min(count, 40)) * heads * dim for heads, dim in spec.row_shapes[1:3]]
        parts = [messages.KV_ROWS.pack(job, start, count)]
        parts += [bytes([7]) * (size * WIRE_DTYPE[self._layout.model_dtype].itemsize) for size in sizes]
        is_right, kind = bool(rows) and rows <= self._missing, Kind.KV
        if provider.ConsumeIntInRange(0, 3) == 0:
            kind, parts = Kind.READ, parts[:1]
            context = {known: begin for known, begin, _ in self.JOBS}.get(job, 0)
            is_right = layer < len(self._layout.layers) and 0 <= start < context and 0 < count <= context - start
        fields = {"kind": kind, "epoch": 5, "sequence": self._numbers[peer], "mini_batch": 0, "layer": layer}
        bend = provider.ConsumeIntInRange(0, 60)
        if bend < len(parts):
            parts[bend], is_right = parts[bend] + b"x", False
        elif bend == 3:
            parts, is_right = parts[: provider.ConsumeIntInRange(0, len(parts) - 1)], False
        elif bend == 4:
            fields["epoch"], is_right = provider.PickValueInList([0, 4, (1 << 64) - 1]), False
        elif bend == 5:
            fields["kind"], is_right = provider.PickValueInList([*set(Kind) - {Kind.KV, Kind.READ}, 99]), False
        lengths = [len(part) for part in parts] + [0] * (3 - len(parts))
        answers = self._port.take(bytes([peer]), [HEADER.pack(MAGIC, VERSION, *fields.values(), *lengths), *parts])
        answer = Kind.STORED if kind is Kind.KV else Kind.KV
        if answers != [answer if is_right else Kind.REFUSED]:
            raise RuntimeError(f"the answers to a {'right' if is_right else 'wrong'} frame were {answers}")
        self._missing -= rows if is_right and kind is Kind.KV else set()
        self._numbers[peer] += 1

    def _control(self, *controls: tuple[int, int, int, int]) -> None:
        self._worker.begin_step(np.array(controls, np.int64), [])
        self._worker.end_step()
