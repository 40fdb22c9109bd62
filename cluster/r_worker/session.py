"""The R-worker's main loop, the same for every link: serves one S-worker from its HELLO to its BYE."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from fastdecode import _rworker
from fastdecode.cluster.links.link import TICK_SECONDS, Link, Spin
from fastdecode.cluster.r_worker.audits import AuditDoor
from fastdecode.cluster.r_worker.host import Host, begin_step, end_step, open_kv_port
from fastdecode.cluster.r_worker.lease import Lease, LeaseError, held_by
from fastdecode.cluster.r_worker.move_door import MoveDoor
from fastdecode.cluster.r_worker.session_journal import JournalDoor
from fastdecode.cluster.r_worker.vitals import Vitals
from fastdecode.cluster.r_worker.weigh_door import WeighDoor
from fastdecode.cluster.wire.frames import FRAME_LIMIT, Frame, Kind
from fastdecode.cluster.wire.handshake import Security
from fastdecode.cluster.wire.leases import LEASE_SECONDS, encode_held
from fastdecode.cluster.wire.messages import (
    CLOCK,
    FIRST_HEAD,
    MAX_HELLO_BYTES,
    Hello,
    Welcome,
    decode_hello,
    encode_refusal,
    encode_welcome,
    fingerprint,
)
from fastdecode.cluster.wire.payload import PayloadSlots, decode_plan, encode_report, row_counts
from fastdecode.core.dtypes import WIRE_DTYPE
from fastdecode.core.errors import CapacityError, DamagedError, FrameError
from fastdecode.core.optional import optional
from fastdecode.kinds.latent import FRAME_BYTES

log = logging.getLogger("fastdecode.r_worker")


class Session:
    """Serves one S-worker. An impossible frame is refused, logged once per reason, and changes nothing.

    Once ``leaving`` is set, every report asks the S-worker to dismiss this R-worker. If the S-worker takes no steps, it
    has no sequences here, so the session just ends.
    """

    def __init__(
        self,
        link: Link,
        host: Host,
        on_open: Callable[[Hello], None] = lambda hello: None,
        security: Security | None = None,
        listens_at: str = "",
        vitals: Vitals | None = None,
        lease: Lease | None = None,
    ) -> None:
        """``security``, ``listens_at`` (a host; "" for none): for the KV port, if the S-worker asks for one.

        ``vitals``: kept up to date for the health port. ``lease``: outlives this session; None by default.
        """
        self.leaving = False
        self._vitals, self._lease = vitals or Vitals(), lease or Lease()
        self._security, self._listens_at = security or Security(), listens_at
        self._kv_port: Any = None
        self._park_door: Any = None
        self._link, self._host, self._on_open = link, host, on_open
        self._heard = time.monotonic()
        self._gives_way_to = ""
        self._spin = Spin()
        self._worker: _rworker.RWorker | None = None
        self._slots: PayloadSlots | None = None
        self._move_door: MoveDoor | None = None
        self._over, self._is_untouched = False, True
        self._refused: set[str] = set()
        self._handlers: dict[Kind, Callable[[Frame], None]] = {
            Kind.HELLO: self._open,
            Kind.WEIGHTS: self._weights,
            Kind.PING: self._ping,
            Kind.PLAN: self._plan,
            Kind.PAYLOAD: self._payload,
            Kind.PICKS: self._picks,
            Kind.END: self._end,
            Kind.ABANDON: self._abandon,
            Kind.INVENTORY: self._inventory,
            Kind.BYE: self._bye,
        }

    def run(self) -> None:
        """Serve until the S-worker has sent BYE, is gone, or was refused.

        All memory is freed then, unless the lease keeps it.
        """
        is_broken = False
        try:
            while not self._over:
                self._turn()
        except ConnectionError as error:
            log.info("the S-worker is gone: %s", error)
            is_broken = True
        finally:
            for door in (self._kv_port, self._park_door):
                if door:
                    door.close()
            if self._worker:
                if self._slots:
                    self._worker.abandon_step()
                is_changed = not self._is_untouched or (self._move_door is not None and self._move_door.has_imported)
                self._lease.leave(self._worker, is_broken, not is_changed)
            self._vitals.closed()

    @property
    def epoch(self) -> int:
        """The epoch that this session's frames carry; 0 before the WELCOME."""
        return self._link.epoch

    def give_way(self, name: str) -> None:
        """Hand the session over to S-worker ``name`` if the served one has been silent for LEASE_SECONDS."""
        if time.monotonic() - self._heard > LEASE_SECONDS:
            self._gives_way_to = name

    def _turn(self) -> None:
        """Handle the next frame, if one arrives within TICK_SECONDS."""
        self._vitals.turn()
        if self._gives_way_to:
            self._link.send(
                Kind.REFUSED, encode_refusal("superseded", f"its session continues with {self._gives_way_to}")
            )
            raise ConnectionError(f"the session continues with {self._gives_way_to}")
        # Most seconds between two steps of an S-worker that has requests to serve
        idle_seconds = 1.0
        try:
            frame = self._next()
            if frame is not None:
                self._heard = time.monotonic()
                self._handler(frame)(frame)
            elif self.leaving and self._slots is None and time.monotonic() - self._heard > idle_seconds:
                self._over = True
        except LeaseError as error:
            self._refuse(error.kind, str(error))
        except DamagedError as error:
            self._refuse("damaged", str(error))
        except FrameError as error:
            self._refuse("frame", str(error))
        except (CapacityError, MemoryError) as error:
            self._refuse("capacity", str(error) or "out of memory")
        except (ValueError, KeyError) as error:
            self._refuse("refused", str(error.args[0] if error.args else error))

    def _next(self) -> Frame | None:
        """Return the next frame; None if none came within TICK_SECONDS. Within a step this busy-waits."""
        frame = self._spin.until(lambda: self._link.receive(0.0)) if self._slots else None
        return frame or self._link.receive(TICK_SECONDS)

    def _handler(self, frame: Frame) -> Callable[[Frame], None]:
        handler = self._handlers.get(frame.kind)
        if handler is None or (self._worker is None) != (frame.kind is Kind.HELLO):
            raise FrameError(f"a {frame.kind.name} frame, which an R-worker does not take")
        return handler

    def _refuse(self, error: str, message: str) -> None:
        if message not in self._refused and len(self._refused) < 100:
            self._refused.add(message)
            log.warning("refused: %s", message)
        self._link.send(Kind.REFUSED, encode_refusal(error, message))
        self._over = self._worker is None

    def _open(self, frame: Frame) -> None:
        hello = decode_hello(self._link.body(frame, MAX_HELLO_BYTES))
        worker = self._lease.open(hello, lambda: self._host.make(hello.layout, hello.block_size))
        if hello.layout.kv_port:
            self._kv_port = open_kv_port(worker, hello.layout, self._security, self._listens_at)
        self._on_open(hello)
        self._worker, self._layout = worker, hello.layout
        self._move_door = MoveDoor(self._link, worker, hello.layout)
        self._handlers |= self._move_door.handlers
        park = self._host.park
        if park:
            self._park_door = optional("park door").ParkDoor(self._link, worker, park, hello.layout, self._vitals)
            self._handlers |= self._park_door.handlers
        if hello.lease and hello.lease.keep_seconds:
            self._handlers |= JournalDoor(self._link, self._lease.journal).handlers
        self._handlers |= WeighDoor(self._link, worker, hello.layout).handlers
        self._handlers |= AuditDoor(self._link, worker, hello.layout).handlers
        self._vitals.opened(worker.num_blocks)
        self._link.epoch = secrets.randbits(63) + 1
        welcome = Welcome(
            num_blocks=worker.num_blocks,
            num_threads=worker.num_threads,
            state_blocks=worker.state_blocks,
            isa=worker.isa,
            read_gb_per_s=self._host.read_gb_per_s,
            cores=self._host.cores,
            host_id=self._host.host_id,
            fingerprint=fingerprint(hello.layout, hello.block_size),
            kv_address=self._kv_port.address if self._kv_port else "",
            kv_epoch=self._kv_port.epoch if self._kv_port else 0,
            park_after=park.after_seconds if park else None,
            lease_epoch=self._lease.epoch,
            goes_on=self._lease.goes_on,
            kept_of=self._lease.kept_of,
        )
        self._link.send(Kind.WELCOME, encode_welcome(welcome))

    def _weights(self, frame: Frame) -> None:
        """Receive K and V projections of some heads of a latent layer; check their size before memory is allocated."""
        layer = self._layout.layers[frame.layer] if frame.layer < len(self._layout.layers) else None
        shape = layer.weight_rows if layer else None
        if layer is None or shape is None:
            raise FrameError(f"WEIGHTS of layer {frame.layer}, for which this R-worker multiplies no weights")
        dtype = WIRE_DTYPE[self._layout.model_dtype]
        num_heads, rest = divmod(frame.lengths[1], math.prod(shape) * dtype.itemsize)
        if frame.lengths[0] != FIRST_HEAD.size or rest or not 0 < num_heads <= layer.num_heads or frame.lengths[2]:
            raise FrameError(f"a WEIGHTS frame with parts of {frame.lengths} bytes: no whole heads of its layer")
        if frame.lengths[1] > FRAME_BYTES:
            raise FrameError(f"a WEIGHTS frame of {frame.lengths[1]:,} bytes; {FRAME_BYTES:,} at most")
        first, rows = bytearray(FIRST_HEAD.size), np.empty((num_heads, *shape), dtype)
        self._link.read_into(first)
        self._link.read_into(rows)
        self._open_worker.set_weights(frame.layer, FIRST_HEAD.unpack(first)[0], rows)
        self._link.send(Kind.READY)

    def _ping(self, frame: Frame) -> None:
        self._link.send(Kind.PONG, CLOCK.pack(time.perf_counter()))

    def _plan(self, frame: Frame) -> None:
        plan = decode_plan(self._link.body(frame))
        slots = PayloadSlots(self._layout, [row_counts(spans) for spans in plan.mini_batches])
        # Most payload bytes of a step: q, k, v and o of one layer for each mini-batch
        payload_limit = 8 * FRAME_LIMIT
        if slots.largest_part > FRAME_LIMIT or slots.num_bytes > payload_limit:
            raise FrameError(
                f"a plan whose payload has {slots.num_bytes:,} bytes ({payload_limit:,} at most), in parts of up to "
                f"{slots.largest_part:,} ({FRAME_LIMIT:,} at most)"
            )
        self._is_untouched = False
        begin_step(self._open_worker, plan)
        try:
            self._link.place(slots)
        except BaseException:
            self._open_worker.abandon_step()
            raise
        self._slots = slots
        self._vitals.num_sequences = sum(map(len, plan.mini_batches))
        self._link.send(Kind.READY)

    def _payload(self, frame: Frame) -> None:
        mini_batch, layer = frame.mini_batch, frame.layer
        if self._slots is None:
            raise FrameError("a PAYLOAD came, and no step is open")
        if mini_batch >= self._slots.num_mini_batches or layer >= self._slots.num_layers:
            raise FrameError(f"a PAYLOAD of mini-batch {mini_batch}, layer {layer}, which the plan does not have")
        q, k, v, o, partials = self._slots.views(mini_batch, layer)
        self._link.load(frame, (q, k, v))
        self._open_worker.run(mini_batch, layer, q, k, v, o, partials)
        self._link.send_arrays(Kind.OUTPUT, mini_batch, layer, (o, partials) if len(partials) else (o,))

    def _picks(self, frame: Frame) -> None:
        data = self._link.body(frame)
        if len(data) % 4:
            raise FrameError(f"a PICKS frame of {len(data)} bytes, which is no multiple of 4")
        counts = np.frombuffer(data, "<i4").astype(np.int32)
        self._open_worker.share(frame.mini_batch, frame.layer, counts)

    def _end(self, frame: Frame) -> None:
        report = end_step(self._open_worker, self.leaving)
        self._slots = None
        self._vitals.stepped(report)
        self._link.send(Kind.REPORT, encode_report(report))

    def _abandon(self, frame: Frame) -> None:
        if self._slots:
            self._slots = None
            self._open_worker.abandon_step()
        if self._move_door:
            self._move_door.abandon()
        self._link.send(Kind.ABANDONED)

    def _inventory(self, frame: Frame) -> None:
        self._link.send(Kind.HELD, encode_held(held_by(self._open_worker)))

    def _bye(self, frame: Frame) -> None:
        self._over = True

    @property
    def _open_worker(self) -> _rworker.RWorker:
        if self._worker is None:
            raise FrameError("no session is open")
        return self._worker
