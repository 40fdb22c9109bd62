"""The S-worker's client of an R-worker in another process, over any link."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from fastdecode.cluster.links.link import Link
from fastdecode.cluster.pool.audit import audit_by
from fastdecode.cluster.pool.calls import TICK_SECONDS, Calls
from fastdecode.cluster.pool.remote_stores import Disk, RemoteDisk, RemoteJournal
from fastdecode.cluster.pool.routed_rows import Arrays
from fastdecode.cluster.pool.weighing import weigh_by
from fastdecode.cluster.pool.worker import PoolWorker
from fastdecode.cluster.pool.worker_info import clock_offset, worker_info
from fastdecode.cluster.wire.frames import Frame, Kind
from fastdecode.cluster.wire.json_bodies import MAX_JSON_BYTES
from fastdecode.cluster.wire.leases import AskedLease, decode_held
from fastdecode.cluster.wire.messages import (
    ALL_TOKENS,
    CHUNK_BYTES,
    EXPORT,
    FIRST_HEAD,
    IMPORT,
    NUM_BYTES,
    Hello,
    Welcome,
    decode_welcome,
    encode_hello,
    fingerprint,
)
from fastdecode.cluster.wire.payload import PayloadSlots, decode_report, encode_plan, row_counts
from fastdecode.core.auditing import AuditAnswer, AuditQuestion
from fastdecode.core.errors import (
    BackendError,
    BusyError,
    ConfigError,
    FrameError,
    SupersededError,
    WorkerLostError,
    interrupts_deferred,
)
from fastdecode.core.held import HeldSequence
from fastdecode.core.machine import process_name
from fastdecode.core.types import RWorkerInfo, WorkerPlan, WorkerReport
from fastdecode.core.weighing import Weighing
from fastdecode.kinds.layout import KVLayout

OPEN_SECONDS = 30.0
"""Most seconds from HELLO to WELCOME. A running R-worker answers in milliseconds, a starting one in seconds."""

TAKE_SECONDS = 5.0
"""Seconds for which to ask for a session that another S-worker has. A silent S-worker loses its session sooner."""


class RemoteWorker(PoolWorker):
    """A ``PoolWorker`` over a link to another process. Once the link is lost, every call raises WorkerLostError.

    Ctrl-C waits until a request is answered, since unread bytes of an answer would garble the next answer. During the
    layers of a step Ctrl-C acts at once, since ``abandon_step`` drops their messages. ``link``: None unless open.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[], Link],
        block_size: int,
        lease: AskedLease | None = None,
        take_seconds: float = TAKE_SECONDS,
    ) -> None:
        """``open`` calls ``connect``, which starts the process or the connection, or raises BackendError.

        ``lease``: set for a named session, which ``opened`` requests repeatedly for up to ``take_seconds``.
        """
        self.name, self._take_seconds = name, take_seconds
        self._connect, self._block_size, self._lease = connect, block_size, lease
        self.calls = Calls(name)
        self._journal = RemoteJournal(self.calls)
        self._in_step = False
        self._room_bytes = 0
        self._offset_seconds = 0.0
        self._outputs: dict[int, tuple[int, tuple[np.ndarray, ...]]] = {}

    @property
    def link(self) -> Link | None:
        return self.calls.link

    def anew(self) -> RemoteWorker:
        """Return a new, unopened client of the same R-worker, which connects or starts a process as this one did."""
        lease = self._lease and msgspec.structs.replace(self._lease, follows="", any_run=False, waits=False)
        return RemoteWorker(self.name, self._connect, self._block_size, lease)

    def open(self, layout: KVLayout) -> None:
        self._layout = layout
        try:
            self.calls.link = self._connect()
        except WorkerLostError as error:
            self.calls.lost = str(error)
            raise
        self.calls.send(Kind.HELLO, encode_hello(Hello(process_name(), layout, self._block_size, self._lease)))

    def opened(self) -> RWorkerInfo:
        answer = self._welcomed(time.monotonic() + self._take_seconds)
        welcome = decode_welcome(self.calls.body(answer, MAX_JSON_BYTES))
        if welcome.fingerprint != fingerprint(self._layout, self._block_size):
            raise FrameError(f"R-worker {self.name} opened a cache of another layout")
        if bool(welcome.kv_address) != bool(self._layout.kv_port):
            raise self.calls.lose("the R-worker opened a KV port without being asked, or opened none although asked")
        self._room_bytes = welcome.num_blocks * self._block_size * self._layout.room_bytes_per_token
        if self._lease and self.link and not self._lease.waits:
            self.link.begin_beats()
        _send_weights(self.calls, self._layout)
        self._offset_seconds = clock_offset(self.calls.ping)
        info = worker_info(self.name, self._layout, self._block_size, welcome)
        self._journal.host = info.host
        return replace(info, held=self._held(welcome), kept_of=welcome.kept_of, epoch=welcome.lease_epoch)

    def _welcomed(self, deadline: float) -> Frame:
        """Wait for the R-worker's WELCOME frame; return the frame.

        If the R-worker still serves the session's previous S-worker, which may be gone, ask again until ``deadline``.
        """
        # An R-worker drops a silent S-worker within milliseconds of the first HELLO of another
        retry_seconds, most_retry_seconds = 0.02, 0.3
        while True:
            try:
                return self.calls.answer(Kind.WELCOME, OPEN_SECONDS)
            except ValueError as refusal:  # refuses the settings in HELLO, the only frame sent yet
                raise ConfigError(f"R-worker {self.name}: {refusal}") from refusal
            except BusyError:
                if self._lease is None or self._lease.epoch or time.monotonic() > deadline:
                    raise
            self.close()
            time.sleep(retry_seconds)
            retry_seconds = min(2 * retry_seconds, most_retry_seconds)
            self.open(self._layout)

    def _held(self, welcome: Welcome) -> tuple[HeldSequence, ...]:
        """Adopt the lease's epoch from ``welcome``; return the sequences kept from the previous S-worker."""
        if bool(welcome.lease_epoch) != (self._lease is not None):
            raise self.calls.lose("the R-worker serves a named session without being asked, or none although asked")
        if self._lease is not None:
            self._lease = msgspec.structs.replace(self._lease, epoch=welcome.lease_epoch)
        if not welcome.goes_on:
            return ()
        self.calls.send(Kind.INVENTORY)
        answer = self.calls.body(self.calls.answer(Kind.HELD))
        with self.calls.losses:
            return decode_held(answer, welcome.num_blocks, self._block_size)

    @interrupts_deferred()
    def begin_step(self, plan: WorkerPlan) -> None:
        self._slots = PayloadSlots(self._layout, [row_counts(spans) for spans in plan.mini_batches])
        with self.calls.losses as link:
            link.place(self._slots)
        self._in_step = True
        self.calls.send(Kind.PLAN, encode_plan(plan))

    @interrupts_deferred()
    def begun(self) -> None:
        self.calls.answer(Kind.READY)

    def submit(self, mini_batch: int, layer: int, arrays: Arrays) -> None:
        if mini_batch in self._outputs:
            raise BackendError(f"submit: mini-batch {mini_batch} has a layer under way; collect it first")
        *_, o, partials = arrays
        self._outputs[mini_batch] = layer, (o,) if partials is None else (o, partials)
        with self.calls.losses as link:
            link.send_arrays(Kind.PAYLOAD, mini_batch, layer, arrays[:3])

    def ready(self, mini_batch: int) -> bool:
        while mini_batch in self._outputs:
            if not self._take(0.0):
                return False
        return True

    def wait(self, mini_batch: int) -> None:
        while mini_batch in self._outputs:
            if not self.calls.spin.until(lambda: self._take(0.0)):
                self._take(TICK_SECONDS)

    @interrupts_deferred()
    def share(self, mini_batch: int, layer: int, counts: np.ndarray) -> None:
        with self.calls.losses as link:
            link.send(Kind.PICKS, counts.astype("<i4").tobytes(), mini_batch=mini_batch, layer=layer)

    @interrupts_deferred()
    def weigh(self, asked: Weighing) -> Callable[[], np.ndarray]:
        return weigh_by(self.calls, self._layout, asked)

    @interrupts_deferred()
    def audit(self, asked: Sequence[AuditQuestion]) -> Callable[[], list[AuditAnswer]]:
        return audit_by(self.calls, self._layout, asked)

    @interrupts_deferred()
    def end_step(self) -> None:
        self.calls.send(Kind.END)

    @interrupts_deferred()
    def ended(self) -> WorkerReport:
        slots = self._slots
        with self.calls.losses:
            times = decode_report(
                self.calls.body(self.calls.answer(Kind.REPORT)), slots.num_mini_batches, slots.num_layers
            )
        self._in_step = False
        for moments in (times.busy_start, times.busy_end):
            moments[moments != 0] -= self._offset_seconds
        return times

    @interrupts_deferred()
    def abandon_step(self) -> None:
        if not self._in_step or self.calls.lost:
            return
        self._in_step = False
        self._outputs.clear()
        try:
            self.calls.send(Kind.ABANDON)
            self.calls.answer(Kind.ABANDONED, discard=True)
        except (BackendError, SupersededError):
            if not self.calls.lost:
                raise

    @interrupts_deferred()
    def export(self, sequence_id: int, start: int, num_tokens: int | None) -> np.ndarray:
        if num_tokens is not None and num_tokens < 0:  # on the wire, -1 asks for all tokens that follow
            raise ValueError(f"export: {num_tokens} tokens from token {start} on; num_tokens must not be negative")
        self.calls.send(Kind.EXPORT, EXPORT.pack(sequence_id, start, ALL_TOKENS if num_tokens is None else num_tokens))
        num_bytes = self.calls.number(self.calls.answer(Kind.EXPORTED), NUM_BYTES)
        if not 0 <= num_bytes <= self._room_bytes:
            raise self.calls.lose(f"the R-worker exports {num_bytes:,} bytes, and its cache holds {self._room_bytes:,}")
        data = np.empty(num_bytes, np.uint8)
        filled = 0
        while filled < data.nbytes:
            frame = self.calls.answer(Kind.DATA)
            if frame.lengths[0] == 0:
                raise self.calls.lose("an empty DATA frame came")
            with self.calls.losses as link:
                link.read_into(data[filled : filled + frame.lengths[0]])
            filled += frame.lengths[0]
        return data

    @interrupts_deferred()
    def import_(self, sequence_id: int, num_tokens: int, data: np.ndarray, start: int) -> None:
        if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
            raise ValueError(f"import: data must be C-contiguous uint8 [num_bytes], not {data.dtype} {data.shape}")
        self.calls.send(Kind.IMPORT, IMPORT.pack(sequence_id, start, num_tokens, data.nbytes))
        self.calls.answer(Kind.READY)
        for start in range(0, data.nbytes, CHUNK_BYTES):
            self.calls.send(Kind.DATA, data[start : start + CHUNK_BYTES])
        self.calls.answer(Kind.IMPORTED)

    @property
    def disk(self) -> Disk:
        return RemoteDisk(self.calls, self._block_size)

    @property
    def journal(self) -> RemoteJournal | None:
        return self._journal if self._lease and self._lease.keep_seconds > 0 else None

    def break_off(self) -> None:
        self.calls.close(farewell=False)

    def close(self) -> None:
        self.calls.close()

    def _take(self, timeout_seconds: float) -> bool:
        """Receive one layer's o into its mini-batch's array; return False if none arrives in time."""
        frame = self.calls.next(timeout_seconds)
        if frame is None:
            return False
        layer, arrays = self._outputs.get(frame.mini_batch, (-1, ()))
        if frame.kind is not Kind.OUTPUT or layer != frame.layer:
            raise self.calls.lose(
                f"a {frame.kind.name} of mini-batch {frame.mini_batch}, layer {frame.layer} came unasked"
            )
        with self.calls.losses as link:
            link.load(frame, arrays)
        del self._outputs[frame.mini_batch]
        return True


def _send_weights(calls: Calls, layout: KVLayout) -> None:
    """Send the R-worker the K and V projections of those latent (MLA) layers that it multiplies by itself."""
    for layer, first, rows in layout.weight_parts():
        with calls.losses as link:
            link.send(Kind.WEIGHTS, FIRST_HEAD.pack(first), rows, layer=layer)
        calls.answer(Kind.READY)
