"""Targets that hold state: a whole R-worker's session, and an S-worker's view of an R-worker, fed frames of any kind.

Most frames are right in most places, since else nothing behind the first check would ever be reached: the fuzzer's
bytes choose what comes next and where it lies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, ClassVar

import atheris
import numpy as np

from fastdecode.cluster import remote
from fastdecode.cluster.links import port
from fastdecode.cluster.links.link import Link
from fastdecode.cluster.r_worker import kv_port, session
from fastdecode.cluster.r_worker.host import Host, RWorkerSize, make_rworker
from fastdecode.cluster.remote import RemoteWorker
from fastdecode.cluster.wire import messages, payload
from fastdecode.cluster.wire.frames import HEADER, MAGIC, VERSION, Kind
from fastdecode.cluster.wire.messages import Hello, Welcome
from fastdecode.core.errors import BackendError, CapacityError, FrameError
from fastdecode.core.types import (
    CONTROL,
    SPAN,
    SPLIT_TOKENS,
    WIRE_DTYPE,
    KVLayout,
    LayerLayout,
    SpanMode,
    Verb,
    WorkerPlan,
    WorkerReport,
)

LAYOUTS = (
    KVLayout((LayerLayout(4, 2, 8, 16, 0.3), LayerLayout(4, 4, 16, 8, 0.3, window=9)), "float32", "float32"),
    KVLayout((LayerLayout(2, 1, 32, 32, 0.2, soft_cap=2.0, sinks=(0.5, 1.0)),), "bfloat16", "int8"),
    KVLayout((LayerLayout(8, 2, 64, 64, 0.1, alibi_slopes=(0.1,) * 8),) * 2, "float16", "int4"),
)
BLOCK_SIZE = 16
CACHE_BYTES = 1 << 19
HOST = Host(RWorkerSize(CACHE_BYTES, 1), "scalar", 1.0, "boot", (0,))
IDS = (0, 1, 2, 3, 4, 5, 9, -1, 1 << 62, -(1 << 63))
NUMBERS = (0, 1, 15, 16, 17, 40, 512, 1 << 20, (1 << 63) - 1, -1, -(1 << 63))
MOST_FRAMES = 40
HELLOS = {layout: messages.encode_hello(Hello("fuzzer", layout, BLOCK_SIZE)) for layout in LAYOUTS}


class KeptWorker:
    """An R-worker that is emptied where it would be closed, for making one takes longer than all the rest."""

    kept: ClassVar[dict[Any, list[KeptWorker]]] = {}

    def __init__(self, key: Any) -> None:
        self._key, self._worker = key, make_rworker(*key)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    @classmethod
    def make(cls, *key: Any) -> KeptWorker:
        """As ``make_rworker``."""
        kept = cls.kept.get(key)
        return kept.pop() if kept else cls(key)

    def close(self) -> None:
        """Drop everything; RuntimeError if then not every block is free."""
        with suppress(ValueError):
            self._worker.abandon_step()
        for sequence_id in IDS:
            with suppress(KeyError):
                self._worker.begin_step(np.array([[Verb.RELEASE, sequence_id, 0, 0]], np.int64), [])
                self._worker.end_step()
        left = self._worker.statistics()
        if left["sequences"] == 0 and (left["blocks_used"] or left["incoming"]):
            raise RuntimeError(f"{left['blocks_used']} blocks are lost, or {left['incoming']} jobs")
        if left["sequences"]:
            self._worker.close()  # of a name that only the fuzzer knows
        else:
            self.kept.setdefault(self._key, []).append(self)


class End(ConnectionError):
    """The fuzzer has no more bytes."""


class FuzzChannel:
    """``Channel`` whose messages are made as they are asked for, and that remembers the kinds of the answers."""

    def __init__(self, make: Callable[[], list[bytes]]) -> None:
        self._make, self._parts = make, list[bytes]()
        self.answers: list[Kind] = []

    def send(self, parts: Sequence[Any]) -> None:
        """Record the kind of the answer."""
        self.answers.append(Kind(HEADER.unpack(bytes(parts[0]))[2]))

    def receive(self, timeout_seconds: float) -> bytes | None:
        """The next message's first part."""
        self._parts = self._make()
        return self._parts.pop(0)

    def read_into(self, buffer: Any) -> None:
        """As libzmq gives parts: whole."""
        view = memoryview(buffer)
        if not self._parts or len(self._parts[0]) != view.nbytes:
            raise FrameError("another length")
        data = self._parts.pop(0)
        if view.nbytes:
            view.cast("B")[:] = data

    def close(self) -> None:
        """Nothing."""


class SessionRun:
    """One session over what the fuzzer says, and what must hold after each frame and at the end."""

    def __init__(self, data: bytes) -> None:
        self._provider = atheris.FuzzedDataProvider(data)
        self._channel = FuzzChannel(self._next)
        self._session = session.Session(Link(self._channel), HOST)
        self._layout = self._provider.PickValueInList(list(LAYOUTS))
        self._frames = 0
        self._before: Any = None

    def run(self) -> None:
        """Every refused frame changes nothing, and a session that is still open goes on as if none had been sent."""
        self._session.run()

    def _next(self) -> list[bytes]:
        self._check_last()
        self._frames += 1
        provider = self._provider
        if self._frames == 1 and provider.ConsumeIntInRange(0, 31):
            return self._frame(Kind.HELLO, HELLOS[self._layout])
        if not provider.remaining_bytes() or self._frames > MOST_FRAMES:
            self._farewell()
        maker = provider.PickValueInList(self._makers())
        return maker()

    def _makers(self) -> list[Callable[[], list[bytes]]]:
        common = [self._plan, self._plan, self._payload, self._payload, self._end, self._abandon, self._export]
        return [*common, self._import, self._data, self._ping, self._any, self._bent]

    def _plan(self) -> list[bytes]:
        provider = self._provider
        controls = [
            (self._near(0, 4), self._id(), self._id(), self._tokens()) for _ in range(provider.ConsumeIntInRange(0, 3))
        ]
        counts = [provider.ConsumeIntInRange(0, 3) for _ in range(provider.ConsumeIntInRange(0, 3))]
        in_order = provider.ConsumeIntInRange(0, 15)
        spans = [[self._span() for _ in range(count)] for count in counts]
        spans = [
            sorted(each, key=lambda span: (1, 3, 2, 0)[span[3] % 4], reverse=True) if in_order else each
            for each in spans
        ]
        arrays = tuple(np.array(each, SPAN) for each in spans)
        return self._frame(Kind.PLAN, payload.encode_plan(WorkerPlan(np.array(controls, CONTROL), arrays)))

    def _span(self) -> tuple[int, int, int, int]:
        sequence_id = self._id()
        context = self._length(sequence_id) if self._provider.ConsumeIntInRange(0, 15) else self._number()
        rows = SPLIT_TOKENS if self._provider.ConsumeIntInRange(0, 7) == 0 else self._near(1, 40)
        return sequence_id, context, rows, self._near(0, len(SpanMode) - 1)

    def _payload(self) -> list[bytes]:
        slots, provider = self._session._slots, self._provider
        mini_batch = provider.ConsumeIntInRange(0, 3)
        layer = provider.ConsumeIntInRange(0, 2)
        sizes = [8]
        if slots and mini_batch < slots.num_mini_batches and layer < slots.num_layers:
            sizes = [slots.stretch(mini_batch, layer).nbytes]
        if provider.ConsumeIntInRange(0, 15) == 0:
            sizes = [min(4000, self._near(0, 4000)) for _ in range(provider.ConsumeIntInRange(0, 3))]
        filler = provider.ConsumeIntInRange(0, 255)
        return self._frame(
            Kind.PAYLOAD, *(bytes([filler]) * max(0, size) for size in sizes), mini_batch=mini_batch, layer=layer
        )

    def _end(self) -> list[bytes]:
        return self._frame(Kind.END)

    def _abandon(self) -> list[bytes]:
        return self._frame(Kind.ABANDON)

    def _ping(self) -> list[bytes]:
        return self._frame(Kind.PING)

    def _piece(self) -> tuple[int, int]:
        """First token and tokens; mostly of the beginning."""
        whole = self._provider.ConsumeIntInRange(0, 3)
        return (0, messages.ALL_TOKENS) if whole else (self._tokens(), self._tokens())

    def _export(self) -> list[bytes]:
        return self._frame(Kind.EXPORT, messages.EXPORT.pack(self._id(), *self._piece()))

    def _import(self) -> list[bytes]:
        tokens = self._tokens()
        right = self._provider.ConsumeIntInRange(0, 7)
        num_bytes = tokens * self._layout.kv_bytes_per_token if right and abs(tokens) < 1 << 40 else self._number()
        return self._frame(Kind.IMPORT, messages.IMPORT.pack(self._id(), self._piece()[0], tokens, num_bytes))

    def _data(self) -> list[bytes]:
        incoming = self._session._incoming
        left = incoming.data.nbytes - incoming.filled if incoming else 8
        if self._provider.ConsumeIntInRange(0, 3) == 0:
            left = self._provider.ConsumeIntInRange(0, left + 8)
        return self._frame(Kind.DATA, bytes([self._provider.ConsumeIntInRange(0, 255)]) * left)

    def _any(self) -> list[bytes]:
        """Any kind with any body."""
        parts = [
            self._provider.ConsumeBytes(self._provider.ConsumeIntInRange(0, 60))
            for _ in range(self._provider.ConsumeIntInRange(0, 3))
        ]
        return self._frame(self._provider.ConsumeIntInRange(0, 40), *parts)

    def _bent(self) -> list[bytes]:
        """A frame that is right but for one field of its header, or its length."""
        head, *parts = self._provider.PickValueInList([self._plan, self._payload, self._end, self._export])()
        fields = list(HEADER.unpack(head))
        place = self._provider.ConsumeIntInRange(0, len(fields))
        if place == len(fields):
            return [head[: self._near(0, HEADER.size)], *parts]
        limits = [0, 0xFFFF, 0xFFFF, *[(1 << 64) - 1] * 2, *[0xFFFFFFFF] * 2, *[(1 << 64) - 1] * 3]
        fields[place] = self._provider.ConsumeIntInRange(0, limits[place]) if place else self._provider.ConsumeBytes(4)
        return [HEADER.pack(*fields), *parts]

    def _frame(self, kind: int, *parts: bytes, mini_batch: int = 0, layer: int = 0) -> list[bytes]:
        conversation = self._session._link
        lengths = [len(part) for part in parts] + [0] * (3 - len(parts))
        sequence = conversation._least_received
        return [HEADER.pack(MAGIC, VERSION, kind, conversation.epoch, sequence, mini_batch, layer, *lengths), *parts]

    def _id(self) -> int:
        return int(self._provider.PickValueInList(list(IDS)))

    def _number(self) -> int:
        return int(self._provider.PickValueInList(list(NUMBERS)))

    def _tokens(self) -> int:
        return SPLIT_TOKENS if self._provider.ConsumeIntInRange(0, 7) == 0 else self._near(0, 80)

    def _near(self, low: int, high: int) -> int:
        """Mostly within the limits."""
        within = self._provider.ConsumeIntInRange(0, 15)
        return int(self._provider.ConsumeIntInRange(low, high)) if within else self._number()

    def _length(self, sequence_id: int) -> int:
        """Tokens that the cache holds of a sequence."""
        worker = self._session._worker
        with suppress(KeyError, AttributeError):
            return int(worker.read_tokens(sequence_id, 0)[0].shape[0])  # type: ignore[union-attr]
        return 0

    def _state(self) -> Any:
        worker = self._session._worker
        found = None if worker is None else worker.statistics()
        return found and [found[name] for name in ("blocks_used", "sequences", "tokens")]

    def _check_last(self) -> None:
        """A refused frame has changed nothing."""
        answers, self._channel.answers = self._channel.answers, []
        now = self._state()
        if Kind.REFUSED in answers and now != self._before:
            raise RuntimeError(f"a refused frame has changed {self._before} to {now}")
        self._before = now

    def _farewell(self) -> None:
        """A session that is open goes on: what is under way is dropped, and questions are answered."""
        if self._session._worker is not None:
            self._channel._make = lambda: self._frame(Kind.ABANDON)
            self._session._turn()
            self._channel._make = lambda: self._frame(Kind.PING)
            self._session._turn()
            if self._channel.answers != [Kind.ABANDONED, Kind.PONG]:
                raise RuntimeError(f"the session does not go on: {self._channel.answers}")
        raise End("the fuzzer has no more bytes")


class AnswersRun:
    """An S-worker's side: whatever an R-worker answers is used, refused, or the loss of that R-worker."""

    def __init__(self, data: bytes) -> None:
        self._provider = atheris.FuzzedDataProvider(data)
        self._channel = FuzzChannel(self._next)
        self._epoch = self._sequence = 0
        self._layout = LAYOUTS[0]
        self._in_ranges = self._provider.ConsumeIntInRange(0, 1)

    def run(self) -> None:
        """Only the documented errors come out of it."""
        worker = RemoteWorker("fuzzer", lambda: Link(self._channel), BLOCK_SIZE)
        in_ranges = self._in_ranges
        plan = WorkerPlan(np.zeros(0, CONTROL), (np.array([(1, 0, 2, 1 + in_ranges)], SPAN),))
        q, k, v, o = (np.zeros((2, heads, dim), np.float32) for heads, dim in ((4, 8), (2, 8), (2, 16), (4, 16)))
        partials = np.zeros((2, 4, 18), np.float32) if in_ranges else None
        with suppress(BackendError, CapacityError, ValueError):
            worker.open(self._layout)
            worker.opened()
            worker.begin_step(plan)
            worker.begun()
            worker.submit(0, 0, q, k, v, o[:0] if in_ranges else o, partials)
            worker.wait(0)
            worker.end_step()
            times = worker.ended()
            if not np.isfinite(times.busy_start).all():
                raise RuntimeError("a time is no number")
            worker.export(1, 0, None)
            worker.import_(1, 2, np.zeros(2 * self._layout.kv_bytes_per_token, np.uint8), 0)
        worker.close()

    def _next(self) -> list[bytes]:
        provider = self._provider
        if not provider.remaining_bytes():
            raise End("the fuzzer has no more bytes")
        kinds = [Kind.WELCOME, Kind.PONG, Kind.READY, Kind.OUTPUT, Kind.REPORT, Kind.EXPORTED, Kind.DATA, Kind.REFUSED]
        expected = self._expected()
        kind = expected if provider.ConsumeIntInRange(0, 15) else provider.PickValueInList(kinds)
        body = self._body(kind)
        if provider.ConsumeIntInRange(0, 15) == 0:
            body = provider.ConsumeBytes(40)
        if kind is Kind.WELCOME:
            self._epoch = provider.ConsumeIntInRange(0, 3)
        length = len(body) if provider.ConsumeIntInRange(0, 15) else provider.ConsumeIntInRange(0, (1 << 64) - 1)
        self._sequence += provider.PickValueInList([1, 1, 1, 0])
        fields = (kind, self._epoch, self._sequence, 0, 0, length, 0, 0)
        return [HEADER.pack(MAGIC, VERSION, *fields), body]

    def _expected(self) -> Kind:
        """What the last question wants answered."""
        last = self._channel.answers[-1] if self._channel.answers else Kind.HELLO
        wanted = {Kind.HELLO: Kind.WELCOME, Kind.PING: Kind.PONG, Kind.PLAN: Kind.READY, Kind.PAYLOAD: Kind.OUTPUT}
        wanted |= {Kind.END: Kind.REPORT, Kind.EXPORT: Kind.EXPORTED, Kind.IMPORT: Kind.READY, Kind.DATA: Kind.IMPORTED}
        return wanted.get(last, Kind.DATA)

    def _body(self, kind: Kind) -> bytes:
        """A right one, mostly."""
        provider = self._provider
        if kind is Kind.WELCOME:
            known = messages.fingerprint(self._layout, BLOCK_SIZE)
            blocks = provider.ConsumeIntInRange(0, 100)
            return messages.encode_welcome(Welcome(blocks, 1, "scalar", 1.0, (0,), "boot", known))
        if kind is Kind.REFUSED:
            return messages.encode_refusal(provider.PickValueInList(["capacity", "refused", "frame"]), "no")
        if kind is Kind.REPORT:
            busy = np.frombuffer(provider.ConsumeBytes(32).ljust(32, b"\0")).reshape(2, 1, 2)
            return payload.encode_report(WorkerReport(busy[0], busy[1], 0.0, 1, provider.ConsumeIntInRange(-2, 100)))
        if kind is Kind.EXPORTED:
            return messages.NUM_BYTES.pack(provider.ConsumeIntInRange(-4, 400))
        sizes = {
            Kind.PONG: 8,
            Kind.OUTPUT: 2 * 4 * (18 if self._in_ranges else 16) * 4,
            Kind.DATA: provider.ConsumeIntInRange(0, 400),
        }
        return bytes([provider.ConsumeIntInRange(0, 255)]) * sizes.get(kind, 0)


class FuzzListener:
    """What a port needs of a listener: the parts of the message at hand, and the kinds of the answers."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.answers: list[Kind] = []

    def send_message(self, parts: Sequence[Any], flags: int = 0) -> None:
        """Record the kind of the answer."""
        self.answers.append(Kind(HEADER.unpack(bytes(parts[1]))[2]))

    def read_part(self, num_bytes: int) -> memoryview:
        """As libzmq gives parts: whole."""
        if not self.parts or len(self.parts[0]) != num_bytes:
            raise FrameError("another length")
        return memoryview(self.parts.pop(0))

    def read_into(self, buffer: Any) -> None:
        """The same, into a buffer."""
        memoryview(buffer)[:] = self.read_part(memoryview(buffer).nbytes)


class FuzzPort(port.Port):
    """A port without a socket and a thread."""

    def __init__(self, handle: port.Handler) -> None:
        self._listener: Any = FuzzListener()
        self.epoch, self._handle, self._open_kinds = 5, handle, frozenset()
        self._reader, self._gate, self._peers, self._logged = port.Reader(self._listener), None, {}, set()

    def send(self, identity: bytes, kind: Kind, *parts: Any, layer: int = 0) -> None:
        """At once."""
        self._conversation(identity).send(kind, *parts, layer=layer)

    def take(self, identity: bytes, parts: list[bytes]) -> list[Kind]:
        """The kinds of the answers to a message."""
        self._listener.parts, self._listener.answers = parts[1:], []
        self._receive(port.PeerChannel(self._listener, identity, parts[0]))
        return list(self._listener.answers)


class KvPortRun:
    """A KV port of an R-worker that waits for the rows of some sequences, one of which has others from before.

    Frames of two peers, most of them right.
    """

    JOBS = ((1, 0, 40), (2, 0, 17), (3, 0, 1), (4, 19, 40))
    """Each with what it has from before, a beginning of SOURCE, and its end."""

    SOURCE, SOURCE_TOKENS = 9, 20

    def __init__(self, data: bytes) -> None:
        self._provider = atheris.FuzzedDataProvider(data)
        self._layout = self._provider.PickValueInList(list(LAYOUTS))
        self._worker = KeptWorker.make(self._layout, BLOCK_SIZE, HOST.size)
        self._port = FuzzPort(kv_port.RowStore(self._worker, self._layout))
        self._missing = {
            (job, layer, token)
            for job, begin, end in self.JOBS
            for layer in range(len(self._layout.layers))
            for token in range(begin, end)
        }
        self._numbers = [0, 0]

    def run(self) -> None:
        """A frame is stored or refused as a set of rows says it should be, and jobs can be committed once whole."""
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
                    raise RuntimeError("committed, and rows are missing")
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
        sizes = [max(0, min(count, 40)) * spec.num_kv_heads * d for d in (spec.key_head_dim, spec.stored_value_dim)]
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
            raise RuntimeError(f"{answers}, and the frame was {'right' if is_right else 'wrong'}")
        self._missing -= rows if is_right and kind is Kind.KV else set()
        self._numbers[peer] += 1

    def _control(self, *controls: tuple[int, int, int, int]) -> None:
        self._worker.begin_step(np.array(controls, np.int64), [])
        self._worker.end_step()


def run_kv_port(data: bytes) -> None:
    KvPortRun(data).run()


def run_session(data: bytes) -> None:
    SessionRun(data).run()


def run_answers(data: bytes) -> None:
    AnswersRun(data).run()


messages.fingerprint = remote.fingerprint = session.fingerprint = cache(messages.fingerprint)
remote.encode_hello = cache(messages.encode_hello)
session.make_rworker = KeptWorker.make  # type: ignore[assignment]
logging.disable(logging.CRITICAL)
TARGETS: dict[str, Callable[[bytes], None]] = {
    "session": run_session,
    "answers": run_answers,
    "kv-port": run_kv_port,
}
_RNG = np.random.default_rng(0)
SEEDS: dict[str, list[bytes]] = {name: [_RNG.bytes(400) for _ in range(20)] for name in TARGETS}
