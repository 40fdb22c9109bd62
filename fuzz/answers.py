"""A fuzz target: the S-worker's side of a session with an R-worker whose answers the fuzzer makes."""

from __future__ import annotations

from contextlib import suppress

import atheris
import msgspec
import numpy as np
from kept import BLOCK_SIZE, LAYOUTS, LEASE, End, FuzzChannel

from fastdecode.cluster.links.link import Link
from fastdecode.cluster.pool.remote import RemoteWorker
from fastdecode.cluster.wire import messages, payload
from fastdecode.cluster.wire.frames import HEADER, MAGIC, VERSION, Kind
from fastdecode.cluster.wire.messages import Welcome
from fastdecode.core.auditing import AuditMode, AuditQuestion
from fastdecode.core.errors import BackendError, CapacityError
from fastdecode.core.types import CONTROL, SPAN, WorkerPlan, WorkerReport

MODES = (AuditMode.CHECK, AuditMode.ATTEND, AuditMode.ROWS, AuditMode.BLOCKS)


class AnswersRun:
    """The S-worker's side of a session. It must use or refuse each answer, or drop the R-worker, but never crash."""

    def __init__(self, data: bytes) -> None:
        self._provider = atheris.FuzzedDataProvider(data)
        self._channel = FuzzChannel(self._next)
        self._epoch = self._sequence = 0
        self._layout = LAYOUTS[0]
        self._in_ranges = self._provider.ConsumeIntInRange(0, 1)
        self._lease = LEASE if self._provider.ConsumeIntInRange(0, 1) else None

    def run(self) -> None:
        """Run a session to its end. Any error other than BackendError, CapacityError and ValueError is a bug."""
        worker = RemoteWorker("fuzzer", lambda: Link(self._channel), BLOCK_SIZE, self._lease)
        in_ranges = self._in_ranges
        plan = WorkerPlan(np.zeros(0, CONTROL), (np.array([(1, 0, 2, 1 + in_ranges)], SPAN),))
        q, k, v, o = (np.zeros((2, heads, dim), np.float32) for heads, dim in ((4, 8), (2, 8), (2, 16), (4, 16)))
        partials = np.zeros((2, 4, 18), np.float32) if in_ranges else None
        with suppress(BackendError, CapacityError, ValueError):
            worker.open(self._layout)
            worker.opened()
            worker.begin_step(plan)
            worker.begun()
            worker.submit(0, 0, (q, k, v, o[:0] if in_ranges else o, partials))
            worker.wait(0)
            asked = [AuditQuestion(mode, 1, 0, 1, 2, q[:1] if mode is AuditMode.ATTEND else None) for mode in MODES]
            worker.audit(asked)()
            worker.end_step()
            times = worker.ended()
            if not np.isfinite(times.busy_start).all():
                raise RuntimeError("a reported time is not finite")
            if worker.journal:
                worker.journal.record(0, b"1234567")
                worker.journal.recorded()
                worker.journal.recall()
            worker.export(1, 0, None)
            worker.import_(1, 2, np.zeros(2 * self._layout.kv_bytes_per_token, np.uint8), 0)
        worker.close()

    def _next(self) -> list[bytes]:
        provider = self._provider
        if not provider.remaining_bytes():
            raise End("the fuzzer has no more bytes")
        kinds = [Kind.WELCOME, Kind.PONG, Kind.READY, Kind.OUTPUT, Kind.REPORT, Kind.EXPORTED, Kind.DATA, Kind.REFUSED]
        kinds += [Kind.HELD, Kind.RECORDED, Kind.RECALLED, Kind.AUDITED]
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
        """Return the kind of answer that fits the last request."""
        last = self._channel.answers[-1] if self._channel.answers else Kind.HELLO
        wanted = {Kind.HELLO: Kind.WELCOME, Kind.PING: Kind.PONG, Kind.PLAN: Kind.READY, Kind.PAYLOAD: Kind.OUTPUT}
        wanted |= {Kind.END: Kind.REPORT, Kind.EXPORT: Kind.EXPORTED, Kind.IMPORT: Kind.READY, Kind.DATA: Kind.IMPORTED}
        wanted |= {Kind.RECORD: Kind.RECORDED, Kind.RECALL: Kind.RECALLED, Kind.INVENTORY: Kind.HELD}
        wanted |= {Kind.AUDIT: Kind.AUDITED}
        return wanted.get(last, Kind.DATA)

    def _body(self, kind: Kind) -> bytes:
        """Return the body of an answer of this kind; in most cases it is correct."""
        provider = self._provider
        if kind is Kind.WELCOME:
            known = messages.fingerprint(self._layout, BLOCK_SIZE)
            blocks = provider.ConsumeIntInRange(0, 100)
            goes_on = bool(self._lease) and provider.ConsumeBool()
            kept_of, epoch = "a" if goes_on else "", provider.ConsumeIntInRange(0, 3) if self._lease else 0
            welcome = Welcome(blocks, 1, "scalar", 1.0, (0,), "boot", known, lease_epoch=epoch)
            return messages.encode_welcome(msgspec.structs.replace(welcome, goes_on=goes_on, kept_of=kept_of))
        if kind is Kind.RECORDED:
            return messages.NUM_BYTES.pack(provider.PickValueInList([7, 7, 7, 8, -1]))
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
