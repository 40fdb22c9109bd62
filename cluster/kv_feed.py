"""The way of keys and values from a prefill worker into an R-worker's cache, through the R-worker's KV port."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import numpy as np

from fastdecode.cluster.links.zeromq import open_channel
from fastdecode.cluster.wire.frames import Conversation, Frame, Kind
from fastdecode.cluster.wire.handshake import Security
from fastdecode.cluster.wire.messages import KV_ROWS, KV_STORED, MAX_JSON_BYTES, decode_refusal
from fastdecode.errors import FrameError

PIECE_BYTES = 1 << 19
"""Of keys and values in one frame, about: an R-worker stores it in a fraction of a millisecond."""

MOST_IN_FLIGHT = 16
"""Frames that wait for their answers: with more, ``store`` waits. This bounds the memory that a slow R-worker costs."""

ANSWER_SECONDS = 30.0
"""Most time to an answer; an R-worker whose host is gone is noticed sooner, by its heartbeats."""

TICK_SECONDS = 0.1


@dataclass(frozen=True)
class Stored:
    """The outcome of one call of ``KvFeed.store``; ``refusal`` says why it failed, "" where it did not."""

    job_id: int
    layer: int
    start: int
    num_rows: int
    refusal: str = ""


@dataclass
class _Store:
    """A call of ``store``, whose frames have ``pieces_left`` answers to come."""

    job_id: int
    layer: int
    start: int
    num_rows: int
    pieces_left: int
    refusal: str = ""


@dataclass(frozen=True)
class _Piece:
    """A frame that waits for its answer, with the arrays that libzmq still reads."""

    store: _Store
    start: int
    k: np.ndarray
    v: np.ndarray


class KvFeed:
    """Stores rows at the KV port of one R-worker; used from one thread.

    Every method raises ConnectionError, saying why, once the R-worker is gone.
    """

    def __init__(self, address: str, epoch: int, security: Security) -> None:
        """``address`` and ``epoch``: of the ``RWorkerInfo``. BackendError where the two sides do not share a key."""
        self.address = address
        self._channel = open_channel(address, security)
        self._conversation = Conversation(self._channel)
        self._conversation.epoch = epoch
        self._in_flight: deque[_Piece] = deque()
        self._done: list[Stored] = []
        self._heard = 0.0

    @property
    def num_in_flight(self) -> int:
        """Frames that wait for their answers."""
        return len(self._in_flight)

    def store(self, job_id: int, layer: int, start: int, k: np.ndarray, v: np.ndarray) -> None:
        """Send the rows of the tokens from ``start`` on; ``poll`` tells their outcome.

        ``k`` [num_rows, num_kv_heads, key_head_dim] and ``v`` [num_rows, num_kv_heads, value_head_dim]: C-contiguous,
        as on the wire, and unchanged until then: large ones are not copied. Waits while MOST_IN_FLIGHT frames are
        unanswered.
        """
        _check_rows(k, v)
        most = max(1, PIECE_BYTES * len(k) // (k.nbytes + v.nbytes))
        begins = range(0, len(k), most)
        store = _Store(job_id, layer, start, len(k), len(begins))
        for begin in begins:
            while len(self._in_flight) >= MOST_IN_FLIGHT:
                self._hear(TICK_SECONDS)
            rows = slice(begin, begin + most)
            self._send(_Piece(store, start + begin, k[rows], v[rows]))

    def poll(self, timeout_seconds: float) -> list[Stored]:
        """Outcomes since the last call, in the order of ``store``; empty when none came in time."""
        deadline = time.monotonic() + timeout_seconds
        while self._in_flight and self._hear(0.0):
            pass
        while self._in_flight and not self._done and (left := deadline - time.monotonic()) > 0:
            self._hear(min(left, TICK_SECONDS))
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        """May be called twice."""
        self._channel.close()

    def _send(self, piece: _Piece) -> None:
        if not self._in_flight:
            self._heard = time.monotonic()
        self._in_flight.append(piece)
        record = KV_ROWS.pack(piece.store.job_id, piece.start, len(piece.k))
        self._conversation.send(Kind.KV, record, piece.k, piece.v, layer=piece.store.layer)

    def _hear(self, timeout_seconds: float) -> bool:
        """Take the next answer, if one comes in time; the R-worker answers in the order of the frames."""
        try:
            frame = self._conversation.receive(timeout_seconds)
            if frame is None:
                self._channel.look_at_connection()
                if time.monotonic() - self._heard > ANSWER_SECONDS:
                    raise ConnectionError(f"it did not answer within {ANSWER_SECONDS:g} s")
                return False
            self._take(frame)
        except FrameError as error:
            raise ConnectionError(str(error)) from error
        self._heard = time.monotonic()
        return True

    def _take(self, frame: Frame) -> None:
        if not self._in_flight:
            raise FrameError(f"it sent a {frame.kind.name} frame, and nothing was asked")
        piece = self._in_flight.popleft()
        store = piece.store
        if frame.kind is Kind.REFUSED:
            store.refusal = decode_refusal(self._conversation.body(frame, MAX_JSON_BYTES))[1]
        elif frame.kind is not Kind.STORED:
            raise FrameError(f"it sent a {frame.kind.name} frame, and STORED was to come")
        elif self._conversation.body(frame, KV_STORED.size) != _stored(piece):
            raise FrameError("it sent a STORED frame for other rows")
        store.pieces_left -= 1
        if store.pieces_left == 0:
            self._done.append(Stored(store.job_id, store.layer, store.start, store.num_rows, store.refusal))


def _stored(piece: _Piece) -> bytes:
    return KV_STORED.pack(piece.store.job_id, piece.store.layer, piece.start, len(piece.k))


def _check_rows(k: np.ndarray, v: np.ndarray) -> None:
    """ValueError unless both are C-contiguous, of three dimensions, and as many rows, at least one."""
    if k.ndim != 3 or v.ndim != 3 or not 0 < len(k) == len(v) or not (k.flags.c_contiguous and v.flags.c_contiguous):
        raise ValueError(
            f"store: k and v must be C-contiguous [num_rows, num_kv_heads, head_dim] of the same rows, not "
            f"{k.shape} and {v.shape}"
        )
