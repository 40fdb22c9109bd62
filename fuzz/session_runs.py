"""Fuzzes an R-worker's session in this process.

Most frames are correct in most fields, since the R-worker's first check would refuse all others. The fuzzer's bytes
choose which frame comes next, and its values.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import atheris
import numpy as np
from kept import BLOCK_SIZE, HELLOS, HOST, IDS, LAYOUTS, MOST_FRAMES, NUMBERS, End, FuzzChannel

from fastdecode.cluster.links.link import Link
from fastdecode.cluster.r_worker import session
from fastdecode.cluster.r_worker.lease import Lease
from fastdecode.cluster.wire import auditing, leases, messages, parked, payload, weighing
from fastdecode.cluster.wire.frames import HEADER, MAGIC, VERSION, Kind
from fastdecode.core.auditing import query_bytes
from fastdecode.core.errors import FrameError
from fastdecode.core.parked import Chain
from fastdecode.core.types import CONTROL, SPAN, SPLIT_TOKENS, SpanMode, WorkerPlan


class SessionRun:
    """One session with frames that the fuzzer chooses, and checks after each frame and at the end."""

    def __init__(self, data: bytes) -> None:
        self._provider = atheris.FuzzedDataProvider(data)
        self._channel = FuzzChannel(self._next)
        self._lease = Lease()
        self._session = session.Session(Link(self._channel), HOST, lease=self._lease)
        self._layout = self._provider.PickValueInList(list(LAYOUTS))
        self._frames = self._looked_at = 0
        self._coming: list[Callable[[], list[bytes]]] = []
        self._before: Any = None

    def run(self) -> None:
        """Check that a refused frame changes nothing, and that the session then continues as before."""
        self._session.run()
        self._lease.close()

    def _next(self) -> list[bytes]:
        self._check_last()
        self._frames += 1
        provider = self._provider
        if self._frames == 1 and provider.ConsumeIntInRange(0, 31):
            return self._frame(Kind.HELLO, HELLOS[self._layout])
        if not provider.remaining_bytes() or self._frames > MOST_FRAMES:
            self._farewell()
        maker = self._coming.pop(0) if self._coming else provider.PickValueInList(self._makers())
        return maker()

    def _makers(self) -> list[Callable[[], list[bytes]]]:
        common = [self._plan, self._plan, self._payload, self._payload, self._end, self._abandon, self._export]
        rare = [
            self._import,
            self._data,
            self._ping,
            self._parking,
            self._park,
            self._wake,
            self._inventory,
            self._weights,
            self._weigh,
            self._audit,
            self._look,
            self._look,
            self._record,
            self._recall,
        ]
        return [*common, *rare, self._any, self._bent]

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

    def _inventory(self) -> list[bytes]:
        return self._frame(Kind.INVENTORY)

    def _weights(self) -> list[bytes]:
        """Return a frame with weights of some heads, in most cases for the one layer that needs weights."""
        first, count = self._near(0, 4), self._near(1, 4)
        rows = bytes(min(max(0, count), 99) * (8 + 12) * 16 * 2 if self._provider.ConsumeIntInRange(0, 15) else 7)
        layer = self._provider.ConsumeIntInRange(0, 1)
        return self._frame(Kind.WEIGHTS, messages.FIRST_HEAD.pack(first), rows, layer=layer)

    def _look(self) -> list[bytes]:
        """Return the plan of a step with one sequence.
        The next frames are the rows of each layer, then questions about attention.
        """
        self._looked_at = self._id()
        layers = [partial(self._layer, layer) for layer in range(len(self._layout.layers))]
        self._coming = [*layers, self._weigh, self._audit, self._weigh, self._audit]
        spans = np.array([(self._looked_at, self._length(self._looked_at), self._near(1, 40), SpanMode.ATTEND)], SPAN)
        return self._frame(Kind.PLAN, payload.encode_plan(WorkerPlan(np.zeros(0, CONTROL), (spans,))))

    def _layer(self, layer: int) -> list[bytes]:
        slots = self._session._slots
        size = slots.stretch(0, layer).nbytes if slots and slots.num_mini_batches else 8
        return self._frame(Kind.PAYLOAD, bytes([self._provider.ConsumeIntInRange(0, 255)]) * size, layer=layer)

    def _weigh(self) -> list[bytes]:
        """Return a question about attention, in most cases in existing layers and of a row at the sequence's end."""
        provider, layout = self._provider, self._layout
        layers = [each for each in range(len(layout.layers)) if provider.ConsumeIntInRange(0, 3)] or [0]
        sequence_id = self._looked_at if provider.ConsumeIntInRange(0, 3) else self._id()
        position = self._length(sequence_id) if provider.ConsumeIntInRange(0, 7) else self._number()
        seen = min(position, (1 << 63) - 2) + 1 if provider.ConsumeIntInRange(0, 7) else self._near(0, 40)
        numbers = sequence_id, position, self._near(0, 600) if provider.ConsumeIntInRange(0, 3) else 0, seen
        head = weighing.HEAD.pack(*numbers, self._near(1, 48), provider.ConsumeBool())
        filler = bytes([provider.ConsumeIntInRange(0, 255)])
        norms = 8 * weighing.num_heads_of(layout, layers) if provider.ConsumeIntInRange(0, 3) == 0 else 0
        parts = filler * weighing.num_query_bytes(layout, layers), filler * norms
        return self._frame(Kind.WEIGH, head + np.array(layers, "<i8").tobytes(), *parts)

    def _audit(self) -> list[bytes]:
        """Return audit questions about up to three rows, most of which exist."""
        provider, asked = self._provider, []
        for _ in range(provider.ConsumeIntInRange(0, 3)):
            sequence_id = self._looked_at if provider.ConsumeIntInRange(0, 3) else self._id()
            stored = self._length(sequence_id) if provider.ConsumeIntInRange(0, 7) else self._number()
            position = max(stored, 1 - (1 << 63)) - 1 if provider.ConsumeIntInRange(0, 3) else self._near(0, 40)
            asked.append((self._near(0, 5), sequence_id, self._near(0, 1), position, stored))
        with suppress(FrameError):
            numbers = np.array(asked, auditing.QUESTION).tobytes()
            questions = auditing.decode_questions(numbers, self._layout)
            filler = bytes([provider.ConsumeIntInRange(0, 255)])
            return self._frame(Kind.AUDIT, numbers, filler * sum(query_bytes(self._layout, each) for each in questions))
        return self._frame(Kind.AUDIT, np.array(asked, auditing.QUESTION).tobytes())

    def _record(self) -> list[bytes]:
        """Return a journal record that, in most cases, continues the journal or replaces it."""
        kept = self._lease.journal.num_bytes
        start = self._provider.PickValueInList([0, kept, kept, self._number()])
        return self._frame(Kind.RECORD, leases.FIRST_BYTE.pack(start), bytes(min(4000, max(0, self._near(0, 99)))))

    def _recall(self) -> list[bytes]:
        return self._frame(Kind.RECALL)

    def _ping(self) -> list[bytes]:
        return self._frame(Kind.PING)

    def _piece(self) -> tuple[int, int]:
        """Return the first token and the number of tokens to copy; in most cases, the whole sequence."""
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
        door = self._session._move_door
        incoming = door._incoming if door else None
        left = incoming.data.nbytes - incoming.filled if incoming else 8
        if self._provider.ConsumeIntInRange(0, 3) == 0:
            left = self._provider.ConsumeIntInRange(0, left + 8)
        return self._frame(Kind.DATA, bytes([self._provider.ConsumeIntInRange(0, 255)]) * left)

    def _parking(self) -> list[bytes]:
        return self._frame(Kind.PARKING, parked.encode_parking(self._provider.PickValueInList(["a", "b"])))

    def _chain(self) -> Chain:
        """Return a chain of a few blocks. Names repeat, so that some chains are found on the disk."""
        count = self._provider.PickValueInList([1, 2, 3, 33])
        return Chain.of([bytes([number]) * 16 for number in range(count)], BLOCK_SIZE)

    def _park(self) -> list[bytes]:
        superseded = [self._chain().name][: self._provider.ConsumeIntInRange(0, 1)]
        return self._frame(Kind.PARK, parked.encode_park(self._near(0, 9), self._id(), self._chain(), superseded))

    def _wake(self) -> list[bytes]:
        chain = self._chain()
        blocks = chain.num_blocks if self._provider.ConsumeIntInRange(0, 7) else self._number()
        return self._frame(Kind.WAKE, parked.WAKE.pack(self._near(0, 9), self._id(), blocks, chain.name))

    def _any(self) -> list[bytes]:
        """Return a frame of any kind with random parts."""
        parts = [
            self._provider.ConsumeBytes(self._provider.ConsumeIntInRange(0, 60))
            for _ in range(self._provider.ConsumeIntInRange(0, 3))
        ]
        return self._frame(self._provider.ConsumeIntInRange(0, 49), *parts)

    def _bent(self) -> list[bytes]:
        """Return a frame with one wrong header field, or with a header of another length."""
        head, *parts = self._provider.PickValueInList(
            [self._plan, self._payload, self._end, self._export, self._weigh, self._audit]
        )()
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
        """Return a number that is, in most cases, within the limits."""
        within = self._provider.ConsumeIntInRange(0, 15)
        return int(self._provider.ConsumeIntInRange(low, high)) if within else self._number()

    def _length(self, sequence_id: int) -> int:
        """Return how many tokens the R-worker has cached of a sequence."""
        worker = self._session._worker
        with suppress(KeyError, AttributeError):
            return int(worker.read_tokens(sequence_id, 0)[0].shape[0])  # type: ignore[union-attr]
        return 0

    def _state(self) -> Any:
        worker = self._session._worker
        found = None if worker is None else worker.statistics()
        return found and [
            *(found[name] for name in ("blocks_used", "sequences", "tokens")),
            self._lease.journal.num_bytes,
        ]

    def _check_last(self) -> None:
        """Raise RuntimeError if the last frame was refused but has changed something."""
        answers, self._channel.answers = self._channel.answers, []
        now = self._state()
        if Kind.REFUSED in answers and now != self._before:
            raise RuntimeError(f"a refused frame has changed {self._before} to {now}")
        self._before = now

    def _farewell(self) -> None:
        """Check that an open session still answers: abandon the step, and send a PING."""
        if self._session._worker is not None:
            self._channel._make = lambda: self._frame(Kind.ABANDON)
            self._session._turn()
            self._channel._make = lambda: self._frame(Kind.PING)
            self._session._turn()
            if self._channel.answers != [Kind.ABANDONED, Kind.PONG]:
                raise RuntimeError(f"the session no longer answers: {self._channel.answers}")
        raise End("the fuzzer has no more bytes")
