"""A prefill worker's server: receives prompts from the S-worker, and exchanges keys and values with others."""

from __future__ import annotations

import logging
import queue
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from fastdecode.cluster.links.port import Port, Reader
from fastdecode.cluster.prefill.jobs import PromptJob, ReadWay
from fastdecode.cluster.prefill.kv_ways import PortHeads, read_way, store_way
from fastdecode.cluster.prefill.messages import (
    JOB,
    PREFILLED,
    TICKETS,
    Failure,
    Place,
    PrefillWelcome,
    Prompt,
    decode_prefill_hello,
    decode_prompt,
    encode,
)
from fastdecode.cluster.prefill.rows import Arrays, EarlyRows, early_place, part_bytes
from fastdecode.cluster.prefill.senders import ChainSender, PrefixReader, Senders, StoreSender
from fastdecode.cluster.prefill.stores import StoreWay
from fastdecode.cluster.wire.frames import Frame, Kind
from fastdecode.cluster.wire.handshake import Security
from fastdecode.cluster.wire.json_bodies import MAX_JSON_BYTES
from fastdecode.cluster.wire.messages import KV_ROWS, KV_STORED
from fastdecode.core.errors import FrameError
from fastdecode.core.machine import host_id
from fastdecode.kinds.layout import KVLayout

log = logging.getLogger("fastdecode.prefills.worker")


@dataclass(frozen=True)
class PrefillModel:
    """The facts of a prefill worker's model. ``name`` identifies its layout and weights."""

    name: str
    layout: KVLayout
    vocab_size: int
    max_model_len: int
    num_threads: int
    cores: tuple[int, ...]
    device: str


class PrefillServer:
    """Serves one S-worker after another. Prompts are computed one by one, in order of arrival.

    The port's thread handles frames. The computing thread calls ``next_job``, then ``finish`` or ``fail``.
    """

    def __init__(self, model: PrefillModel, security: Security) -> None:
        self.model = model
        self._layout = model.layout
        self._heads = PortHeads(model.layout, [layer.num_kv_heads for layer in model.layout.layers])
        self._security = security
        self._senders = Senders(security, self._cannot_send)
        self._port: Port | None = None
        self._peer: bytes | None = None
        self._serving = ""
        self._queue: queue.SimpleQueue[PromptJob] = queue.SimpleQueue()
        self._jobs: dict[int, PromptJob] = {}
        self._early = EarlyRows()
        self._ended: OrderedDict[int, None] = OrderedDict()
        self._handlers: dict[Kind, Callable[[Port, bytes, Frame, Reader], None]] = {
            Kind.HELLO: self._open,
            Kind.PROMPT: self._prompt,
            Kind.CANCEL: self._cancel,
            Kind.KV: self._kv,
            Kind.BYE: self._bye,
        }

    def listen(self, host: str, port: int) -> str:
        """Open the port; return its address, "host:port". Raise OSError if listening fails."""
        self._port = Port(host, port, self._security, self._handle, open_kinds=frozenset({Kind.HELLO}))
        return self._port.address

    def next_job(self, timeout_seconds: float) -> PromptJob | None:
        """Wait for the next prompt part to compute; return its job, or None if none came in time."""
        try:
            return self._queue.get(timeout=timeout_seconds)
        except queue.Empty:
            return None

    def finish(self, job: PromptJob, seconds: float, logits: np.ndarray | None) -> None:
        """Report the computed part of ``job`` to the S-worker, once the R-workers have stored its rows."""
        if job.is_cancelled:
            return
        counts = PREFILLED.pack(job.prompt.job_id, seconds, job.sent_bytes, job.stores.num_bytes, job.read_bytes)
        own = b"" if logits is None else logits

        def tell() -> None:
            self._report(job, Kind.PREFILLED, counts + np.array(sorted(job.stores.missed), TICKETS).tobytes(), own)

        stores = job.prompt.own_stores
        job.stores.when_stored([each.ticket for each in stores for _ in each.places], tell)
        for each in [each for each in stores if each.ticket not in job.stores.missed]:
            try:
                for sender in self._senders.of_each(StoreSender, each):
                    sender.when_stored(each.ticket, partial(job.stores.stored, each.ticket))
            except ConnectionError as error:
                self._miss(job, each.ticket, str(error))

    def fail(self, job: PromptJob, reason: str) -> None:
        """Report to the S-worker that ``job`` cannot be computed, unless the S-worker has cancelled the job."""
        if not job.is_cancelled:
            job.cancel()
            self._report(job, Kind.FAILED, encode(Failure(job.prompt.job_id, reason)))

    @property
    def is_free(self) -> bool:
        """True while no S-worker is served."""
        return self._peer is None

    def close(self) -> None:
        self._drop_peer()
        if self._port:
            self._port.close()
            self._port = None

    def _report(self, job: PromptJob, kind: Kind, *parts: bytes | np.ndarray) -> None:
        if self._end(job.prompt.job_id) is job and self._port and self._peer is not None:
            self._port.send(self._peer, kind, *parts)

    def _handle(self, port: Port, identity: bytes, frame: Frame, reader: Reader) -> None:
        handler = self._handlers.get(frame.kind)
        if frame.kind is Kind.BYE and identity != self._peer:
            return  # the frame is from an S-worker that was refused, or is served no more
        if handler is None:
            raise FrameError(f"a {frame.kind.name} frame, which a prefill worker does not take")
        if frame.kind not in (Kind.HELLO, Kind.KV) and identity != self._peer:
            raise FrameError(f"a {frame.kind.name} frame of a peer that is not served")
        handler(port, identity, frame, reader)

    def _open(self, port: Port, identity: bytes, frame: Frame, reader: Reader) -> None:
        hello = decode_prefill_hello(reader.body(frame, MAX_JSON_BYTES))
        if self._peer is not None and identity != self._peer:
            port.refuse(identity, "busy", f"this prefill worker serves another S-worker, {self._serving}")
            return
        if hello.model != self.model.name or hello.max_model_len > self.model.max_model_len:
            message = f"this prefill worker has another model, or a --max-model-len below {hello.max_model_len}"
            port.refuse(identity, "refused", message)
            return
        own = self.model.layout.with_state_dtype(hello.state_dtype)
        layout = replace(own, kv_dtype=hello.kv_dtype, isa=hello.isa)
        heads = PortHeads(layout, hello.kv_heads)
        self._drop_peer()
        self._peer, self._serving = identity, hello.name
        self._layout, self._heads = layout, heads
        port.renew_epoch()
        port.look_after(identity, self._drop_peer)
        welcome = PrefillWelcome(
            num_threads=self.model.num_threads,
            cores=self.model.cores,
            host_id=host_id(),
            device=self.model.device,
            model=self.model.name,
            port_epoch=port.epoch,
        )
        port.send(identity, Kind.WELCOME, encode(welcome))
        log.info("serving %s", hello.name)

    def _prompt(self, port: Port, identity: bytes, frame: Frame, reader: Reader) -> None:
        num_tokens, rest = divmod(frame.lengths[1], 8)
        if frame.lengths[0] > MAX_JSON_BYTES or rest or num_tokens > self.model.max_model_len or frame.lengths[2]:
            most = f"{MAX_JSON_BYTES:,} and {8 * self.model.max_model_len:,} at most"
            raise FrameError(f"a PROMPT frame with parts of {frame.lengths} bytes; {most}")
        body = bytearray(frame.lengths[0])
        reader.read_into(body)
        tokens = reader.array((num_tokens,), np.dtype(np.int64)).copy()
        prompt = decode_prompt(body, tokens, self.model.max_model_len, self.model.vocab_size)
        most_jobs = 1 << 12
        if len(self._jobs) >= most_jobs or prompt.job_id in self._jobs:
            raise FrameError(f"PROMPT: job {prompt.job_id} was sent before, or {most_jobs:,} other jobs wait already")
        send_on = partial(self._senders.of(ChainSender, prompt.next).send, prompt.job_id) if prompt.next else None
        for each in (*prompt.stores, *prompt.prefix):
            self._heads.check(len(each.places))
        job = PromptJob(prompt, tokens, self._layout, send_on, self._stores(prompt), self._prefix(prompt))
        for layer, start, arrays in self._early.take(prompt.job_id):
            job.take_in(layer, start, arrays)
        self._jobs[prompt.job_id] = job
        try:
            job.begin()
        except ConnectionError as error:
            self.fail(job, str(error))
        self._queue.put(job)

    def _stores(self, prompt: Prompt) -> tuple[StoreWay, ...]:
        """Return, for each R-worker that stores rows of this part, the function that sends rows to it."""
        ways = [(each, self._senders.of_each(StoreSender, each)) for each in prompt.own_stores]
        return tuple(StoreWay(each.start, each.end, store_way(each, self._heads, to), each.ticket) for each, to in ways)

    def _prefix(self, prompt: Prompt) -> tuple[ReadWay, ...]:
        """Return, for each R-worker that holds some of the prefix, the function that reads from it."""
        return tuple(
            ReadWay(each.start, each.end, read_way(each, self._heads, self._senders.of_each(PrefixReader, each)))
            for each in prompt.own_prefix
        )

    def _kv(self, port: Port, identity: bytes, frame: Frame, reader: Reader) -> None:
        job_id, start, num_rows = reader.record(KV_ROWS)
        if job_id not in self._ended:
            self._take_in(reader, frame, job_id, start, num_rows)
        port.send(identity, Kind.STORED, KV_STORED.pack(job_id, frame.layer, start, num_rows))

    def _take_in(self, reader: Reader, frame: Frame, job_id: int, start: int, num_rows: int) -> None:
        arrays = self._place(job_id, frame, start, num_rows)
        for each in arrays:
            reader.read_into(each)
        if job := self._jobs.get(job_id):
            job.filled(frame.layer, start, num_rows)
        else:
            self._early.keep(job_id, frame.layer, start, arrays)

    def _place(self, job_id: int, frame: Frame, start: int, num_rows: int) -> Arrays:
        """Return the arrays into which a KV frame's rows are read. Raise FrameError for wrong sizes."""
        layers = self._layout.layers
        if not (frame.layer < len(layers) and start >= 0 and 0 < num_rows <= self.model.max_model_len):
            wrong = f"layer {frame.layer}, {num_rows} rows from position {start}"
            raise FrameError(f"KV: {wrong}; the model has {len(layers)} layers")
        if job := self._jobs.get(job_id):
            arrays = job.place_for(frame.layer, start, num_rows)
        else:
            arrays = early_place(self._layout, frame.layer, num_rows, frame.lengths[1:])
        if frame.lengths[1:] != part_bytes(arrays):
            raise FrameError(f"KV: {num_rows} rows in parts of {frame.lengths[1:]} bytes, not {part_bytes(arrays)}")
        return arrays

    def _cancel(self, port: Port, identity: bytes, frame: Frame, reader: Reader) -> None:
        data = reader.body(frame, JOB.size)
        if len(data) != JOB.size:
            raise FrameError(f"a CANCEL frame of {len(data)} bytes, not {JOB.size}")
        (job_id,) = JOB.unpack(data)
        if job := self._end(job_id):
            job.cancel()

    def _end(self, job_id: int) -> PromptJob | None:
        """Forget job ``job_id``, so that late frames for it are dropped; return the job, or None if unknown."""
        self._early.take(job_id)
        self._ended[job_id] = None
        # Most ended jobs whose ids are remembered, so that late frames for them are dropped
        most_ended = 1 << 12
        if len(self._ended) > most_ended:
            self._ended.popitem(last=False)
        return self._jobs.pop(job_id, None)

    def _bye(self, port: Port, identity: bytes, frame: Frame, reader: Reader) -> None:
        self._drop_peer()

    def _drop_peer(self) -> None:
        """End the session of the S-worker, which is lost, and cancel all its jobs."""
        if self._peer is not None:
            log.info("free")
        self._peer, self._serving = None, ""
        for job in list(self._jobs.values()):
            job.cancel()
        self._jobs.clear()
        self._early.clear()
        self._ended.clear()
        self._senders.close()

    def _cannot_send(self, numbers: list[int], place: Place, reason: str, is_lost: bool) -> None:
        """Handle a failure to send to, or read from, ``place``.

        ``numbers``: the affected job ids or tickets. If ``is_lost``, the port is gone, and a later job connects again.
        """
        if is_lost:
            self._senders.drop_ended()
        known = set(numbers)
        for job in list(self._jobs.values()):
            if job.prompt.depends_on(place, known):
                self.fail(job, f"{place.address}: {reason}")
                continue
            for each in job.prompt.stores:
                if place in each.places and each.ticket in known:
                    self._miss(job, each.ticket, f"{place.address}: {reason}")

    def _miss(self, job: PromptJob, ticket: int, reason: str) -> None:
        """Continue ``job`` without the R-worker that knows it as ``ticket``, if other R-workers store all rows."""
        if not job.stores.miss(ticket):
            self.fail(job, reason)
        elif not job.is_cancelled:
            log.warning("job %d continues without one of two copies: %s", job.prompt.job_id, reason)
