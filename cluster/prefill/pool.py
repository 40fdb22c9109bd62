"""The S-worker's pool of prefill workers: gives them prompts, and collects the results."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from fastdecode.cluster.links.link import Link
from fastdecode.cluster.links.zeromq import ZmqChannel
from fastdecode.cluster.pool.attempts import Attempts
from fastdecode.cluster.prefill.client import PrefillClient, refusal
from fastdecode.cluster.prefill.messages import (
    JOB,
    MAX_PLACES,
    PREFILLED,
    TICKETS,
    Place,
    PlacedRows,
    PrefillHello,
    Prompt,
    decode_failure,
    encode,
)
from fastdecode.cluster.wire.frames import Frame, Kind
from fastdecode.cluster.wire.json_bodies import MAX_JSON_BYTES
from fastdecode.core.dtypes import ITEM_BYTES, WIRE_DTYPE
from fastdecode.core.errors import BackendError, FrameError, WorkerLostError
from fastdecode.core.machine import process_name
from fastdecode.core.remote_prefill import Prefilled, PrefillOutcomes, RemotePrefill, StoredAt
from fastdecode.core.types import RWorkerInfo
from fastdecode.kinds.layout import KVLayout

logger = logging.getLogger(__name__)


@dataclass
class _Job:
    """A prompt that prefill workers compute: its workers, and the progress of each part."""

    prefill: RemotePrefill
    seconds: list[float] = field(default_factory=list)
    sent_bytes: int = 0
    stored_bytes: int = 0
    read_bytes: int = 0
    missed: set[int] = field(default_factory=set)
    logits: np.ndarray | None = None


class PrefillPool:
    """A ``PrefillBackend`` over links to prefill workers.

    ``addresses``: for each worker, the "host:port" at which other workers reach it.
    """

    def __init__(
        self,
        clients: Sequence[PrefillClient],
        addresses: Callable[[], Sequence[str]],
        connect: Callable[[str], Link],
    ) -> None:
        """``addresses``: called once all workers are open. ``connect``: called with the address of one that joins."""
        self._connect = connect
        self.clients: list[PrefillClient | None] = list(clients)
        self._find_addresses = addresses
        self.addresses: list[str] = []
        self._jobs: dict[int, _Job] = {}
        self._found = PrefillOutcomes([], [], [], [])
        self._hello, self._model = b"", ""
        self._invited: set[str] = set()
        self._attempts = Attempts()
        self._opened: queue.SimpleQueue[PrefillClient] = queue.SimpleQueue()
        self._logits = (0, np.dtype(np.float32))

    def open(self, model: str, max_model_len: int, vocab_size: int, layout: KVLayout, kv_heads: Sequence[int]) -> int:
        self._logits = (vocab_size * ITEM_BYTES[layout.model_dtype], WIRE_DTYPE[layout.model_dtype])
        hello = encode(
            PrefillHello(
                process_name(), model, max_model_len, layout.kv_dtype, layout.state_dtype, layout.isa, tuple(kv_heads)
            )
        )
        clients = [client for client in self.clients if client]
        try:
            for client in clients:
                client.open(hello)
            for client in clients:
                client.opened(model)
        except BaseException:
            self.close()
            raise
        self.addresses = list(self._find_addresses())
        self._hello, self._model = hello, model
        return len(clients)

    def submit(self, prefill: RemotePrefill, r_workers: Sequence[RWorkerInfo]) -> None:
        self._jobs[prefill.job_id] = _Job(prefill)
        bounds = (*(part.start for part in prefill.parts), prefill.parts[-1].end)
        tokens = np.array(prefill.token_ids, np.int64)
        stores, prefix = (tuple(_placed(each, r_workers) for each in some) for some in (prefill.stores, prefill.prefix))
        for index in reversed(range(len(prefill.parts))):  # a part's receiver gets its job before the sender
            part = prefill.parts[index]
            if prefill.job_id not in self._jobs:
                return  # a worker was lost meanwhile, so the job has failed
            prompt = Prompt(
                job_id=prefill.job_id,
                method=prefill.method,
                part=index,
                bounds=bounds,
                next=self._next(prefill, index),
                stores=stores,
                prefix=prefix,
            )
            self._send(part.worker, Kind.PROMPT, encode(prompt), tokens[part.start : part.end])

    def cancel(self, job_id: int) -> None:
        job = self._jobs.pop(job_id, None)
        for worker in {part.worker for part in job.prefill.parts} if job else ():
            self._send(worker, Kind.CANCEL, JOB.pack(job_id))

    def wait(self, timeout_seconds: float) -> None:
        deadline = time.monotonic() + timeout_seconds
        # Seconds between two checks for frames on all links, for an engine without other work
        look_seconds = 0.001
        while not self._hear() and time.monotonic() < deadline:
            time.sleep(look_seconds)

    def outcomes(self) -> PrefillOutcomes:
        self._hear()
        outcomes, self._found = self._found, PrefillOutcomes([], [], [], [])
        return outcomes

    def invite(self, address: str) -> None:
        """Open a session with the worker at ``address``, in its own thread, so that no step waits."""
        known = address in self.addresses or address in self._invited
        if self._hello and not known and self._attempts.may_try(address):
            self._invited.add(address)
            threading.Thread(target=self._open, args=(address,), name=f"join {address}", daemon=True).start()

    @property
    def jobs(self) -> list[int]:
        return list(self._jobs)

    def close(self) -> None:
        for client in self.clients:
            if client:
                client.close()
        self.clients = []

    def _next(self, prefill: RemotePrefill, index: int) -> Place | None:
        """Return the port to which part ``index`` sends keys and values: the next worker in the chain or ring.

        Return None if no worker is next.
        """
        count = len(prefill.parts)
        if count == 1 or (index == count - 1 and prefill.method != "tsp"):
            return None
        worker = prefill.parts[(index + 1) % count].worker
        client = self.clients[worker]
        return Place(self.addresses[worker], client.port_epoch if client else 1)

    def _send(self, worker: int, kind: Kind, *parts: bytes | np.ndarray) -> None:
        client = self.clients[worker]
        if client is None or client.link is None:
            self._lose(worker, "its connection has closed")
            return
        try:
            client.link.send(kind, *parts)
        except ConnectionError as error:
            self._lose(worker, str(error))

    def _hear(self) -> bool:
        """Read all frames that have arrived; return True if ``outcomes`` has new entries."""
        for worker, client in enumerate(self.clients):
            try:
                while client and client.link and (frame := client.link.receive(0.0)):
                    self._take(client, client.link, frame)
                if client and client.link and isinstance(client.link.channel, ZmqChannel):
                    client.link.channel.look_at_connection()
            except (ConnectionError, FrameError) as error:
                self._lose(worker, str(error))
        self._take_in()
        return any(self._found)

    def _open(self, address: str) -> None:
        client = PrefillClient(address, partial(self._connect, address))
        try:
            client.open(self._hello)
            client.opened(self._model)
            self._opened.put(client)
            self._attempts.succeeded(address)
        except (BackendError, ConnectionError) as error:
            client.close()
            if self._attempts.failed(address, str(error)):
                logger.warning("a prefill worker asked to join and cannot: %s", error)
            self._invited.discard(address)

    def _take_in(self) -> None:
        """Add workers that have joined to the pool, with the next indices."""
        while not self._opened.empty():
            client = self._opened.get()
            self._invited.discard(client.name)
            self._found.joined.append(len(self.clients))
            self.clients.append(client)
            self.addresses.append(client.name)

    def _take(self, client: PrefillClient, link: Link, frame: Frame) -> None:
        if frame.kind is Kind.FAILED:
            failure = decode_failure(link.body(frame, MAX_JSON_BYTES))
            logger.warning("prefill worker %s: %s", client.name, failure.reason)
            self._fail(failure.job_id)
        elif frame.kind is Kind.PREFILLED:
            self._part_done(link, frame)
        elif frame.kind is Kind.REFUSED:
            raise FrameError(f"the prefill worker refused: {refusal(link, frame)}")
        else:
            raise FrameError(f"a {frame.kind.name} frame, which the S-worker does not take")

    def _part_done(self, link: Link, frame: Frame) -> None:
        num_bytes, dtype = self._logits
        num_missed, rest = divmod(frame.lengths[0] - PREFILLED.size, TICKETS.itemsize)
        if not 0 <= num_missed <= MAX_PLACES or rest or frame.lengths[1] not in (0, num_bytes) or frame.lengths[2]:
            raise FrameError(f"a PREFILLED frame with parts of {frame.lengths} bytes; logits have {num_bytes}")
        head, logits = bytearray(frame.lengths[0]), np.empty(frame.lengths[1] // dtype.itemsize, dtype)
        link.read_into(head)
        if logits.nbytes:
            link.read_into(logits)
        job_id, seconds, sent_bytes, stored_bytes, read_bytes = PREFILLED.unpack_from(head)
        job = self._jobs.get(job_id)
        if job is None:
            return  # the prompt was cancelled meanwhile
        job.seconds.append(seconds)
        job.sent_bytes += sent_bytes
        job.stored_bytes += stored_bytes
        job.read_bytes += read_bytes
        job.missed.update(np.frombuffer(head, TICKETS, offset=PREFILLED.size).tolist())
        if logits.nbytes:
            job.logits = logits
        if len(job.seconds) == len(job.prefill.parts):
            self._finish(job)

    def _finish(self, job: _Job) -> None:
        job_id = job.prefill.job_id
        if job.logits is None:
            self._fail(job_id)
            return
        del self._jobs[job_id]
        sequence_id, seconds = job.prefill.sequence_id, max(job.seconds)
        num_bytes = job.sent_bytes, job.stored_bytes, job.read_bytes
        self._found.computed.append(
            Prefilled(sequence_id, job_id, job.logits, seconds, *num_bytes, tuple(sorted(job.missed)))
        )

    def _fail(self, job_id: int) -> None:
        if job_id in self._jobs:
            self.cancel(job_id)
            self._found.failed.append(job_id)

    def _lose(self, worker: int, reason: str) -> None:
        """Continue without worker ``worker``; the jobs in which it computes a part fail."""
        client, self.clients[worker] = self.clients[worker], None
        if client is None:
            return
        logger.warning("%s", WorkerLostError(f"prefill worker {client.name} is lost: {reason}"))
        client.close()
        self._found.lost.append(worker)
        if worker < len(self.addresses):
            self.addresses[worker] = ""  # allow the prefill worker to join again
        for job_id, job in list(self._jobs.items()):
            if any(part.worker == worker for part in job.prefill.parts):
                self._fail(job_id)


def _placed(stored: StoredAt, r_workers: Sequence[RWorkerInfo]) -> PlacedRows:
    """Return the KV ports of the R-worker that stores the tokens of ``stored``, in the form for messages."""
    places = tuple(Place(port.address, port.epoch) for port in r_workers[stored.r_worker].kv_ports)
    return PlacedRows(places, stored.start, stored.end, stored.ticket)
