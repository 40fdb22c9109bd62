"""Transfer of keys and values between a prefill worker and the port of an R-worker or another prefill worker."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import numpy as np

from fastdecode.cluster.links.zeromq import ZmqChannel
from fastdecode.cluster.wire.frames import Conversation, Frame, Kind
from fastdecode.cluster.wire.handshake import Security, proven
from fastdecode.cluster.wire.json_bodies import MAX_JSON_BYTES
from fastdecode.cluster.wire.messages import KV_ROWS, KV_STORED, MOST_IN_FLIGHT, decode_refusal
from fastdecode.core.errors import FrameError

TICK_SECONDS = 0.1


@dataclass(frozen=True)
class Stored:
    """The outcome of one call of ``KvFeed.store`` or ``read``. ``refusal``: why the call failed; "" on success."""

    job_id: int
    layer: int
    start: int
    num_rows: int
    refusal: str = ""


@dataclass
class _Call:
    """A call of ``store`` or ``read`` in progress. ``pieces_left``: number of its frames without an answer."""

    kind: Kind
    job_id: int
    layer: int
    start: int
    num_rows: int
    pieces_left: int
    refusal: str = ""


@dataclass(frozen=True)
class _Piece:
    """A sent frame that waits for its answer, and its arrays: libzmq still reads them, or the answer fills them."""

    call: _Call
    start: int
    arrays: tuple[np.ndarray, ...]

    @property
    def rows(self) -> bytes:
        """The first part of the frame: job id, first row, number of rows."""
        return KV_ROWS.pack(self.call.job_id, self.start, len(self.arrays[0]))

    @property
    def lengths(self) -> tuple[int, ...]:
        """The length in bytes of each of the frame's parts, at most three."""
        return (KV_ROWS.size, *(each.nbytes for each in self.arrays), 0)[:3]


class KvFeed:
    """Stores rows at the port of one worker, and reads prefixes from an R-worker's port. Use it from one thread.

    Every method raises ConnectionError, with the reason, once the worker is gone.
    """

    def __init__(self, address: str, epoch: int, security: Security) -> None:
        """``epoch``: the epoch of the port at ``address``. Raise BackendError if the two sides do not share a key."""
        self.address = address
        self._channel = proven(ZmqChannel(address, security.curve_secret), security, address)
        self._conversation = Conversation(self._channel)
        self._conversation.epoch = epoch
        self._in_flight: deque[_Piece] = deque()
        self._done: list[Stored] = []
        self._heard = 0.0

    @property
    def num_in_flight(self) -> int:
        """Number of sent frames whose answers have not arrived."""
        return len(self._in_flight)

    def store(self, job_id: int, layer: int, start: int, *arrays: np.ndarray) -> None:
        """Send the rows of the tokens from ``start`` on; ``poll`` returns the outcome.

        ``arrays``: k [num_rows, num_kv_heads, key_head_dim] and v [num_rows, num_kv_heads, value_head_dim], or stored
        uint8 [num_rows, bytes] of a prefix. They are C-contiguous, in wire form, and must not change until the outcome,
        since large ones are not copied. The call waits while MOST_IN_FLIGHT frames are unanswered. Raise ValueError for
        other arrays.
        """
        _check_rows(arrays)
        self._call(Kind.KV, job_id, layer, start, arrays)

    def read(self, job_id: int, layer: int, start: int, stored: np.ndarray) -> None:
        """Request cached tokens from ``start`` on of the job's sequence; their bytes are written to ``stored``.

        The sequence must have had the tokens when the job was reserved. ``stored``: C-contiguous uint8 [num_rows,
        bytes], in the form of ``_rworker.RWorker.read_prefix``. ``poll`` returns an outcome once it is filled.
        """
        if stored.ndim != 2 or stored.dtype != np.uint8 or not len(stored) or not stored.flags.c_contiguous:
            raise ValueError(f"stored must be C-contiguous uint8 [num_rows, bytes], not {stored.dtype}{stored.shape}")
        self._call(Kind.READ, job_id, layer, start, (stored,))

    def poll(self, timeout_seconds: float) -> list[Stored]:
        """Return the outcomes since the last call, in the order of the calls; empty if none came in time."""
        deadline = time.monotonic() + timeout_seconds
        while self._in_flight and self._hear(0.0):
            pass
        while self._in_flight and not self._done and (left := deadline - time.monotonic()) > 0:
            self._hear(min(left, TICK_SECONDS))
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        """Close the connection; may be called twice."""
        self._channel.close()

    def _call(self, kind: Kind, job_id: int, layer: int, start: int, arrays: tuple[np.ndarray, ...]) -> None:
        """Send ``arrays`` as frames of ``kind``, some rows in each, and record the call until all are answered."""
        num_rows = len(arrays[0])
        # Approximate bytes of keys and values per frame. An R-worker stores or reads them in a fraction of a
        # millisecond.
        piece_bytes = 1 << 19
        most = max(1, piece_bytes * num_rows // sum(each.nbytes for each in arrays))
        begins = range(0, num_rows, most)
        call = _Call(kind, job_id, layer, start, num_rows, len(begins))
        for begin in begins:
            while len(self._in_flight) >= MOST_IN_FLIGHT:
                self._hear(TICK_SECONDS)
            self._send(_Piece(call, start + begin, tuple(each[begin : begin + most] for each in arrays)))

    def _send(self, piece: _Piece) -> None:
        if not self._in_flight:
            self._heard = time.monotonic()
        self._in_flight.append(piece)
        payload = piece.arrays if piece.call.kind is Kind.KV else ()
        self._conversation.send(piece.call.kind, piece.rows, *payload, layer=piece.call.layer)

    def _hear(self, timeout_seconds: float) -> bool:
        """Receive the next frame's answer; return False if none comes in time. Answers come in the order of frames."""
        # Most seconds for an answer. A lost host of an R-worker is noticed sooner, by its heartbeats.
        answer_seconds = 30.0
        try:
            frame = self._conversation.receive(timeout_seconds)
            if frame is None:
                self._channel.look_at_connection()
                if time.monotonic() - self._heard > answer_seconds:
                    raise ConnectionError(f"no answer came within {answer_seconds:g} s")
                return False
            self._take(frame)
        except FrameError as error:
            raise ConnectionError(str(error)) from error
        self._heard = time.monotonic()
        return True

    def _take(self, frame: Frame) -> None:
        if not self._in_flight:
            raise FrameError(f"a {frame.kind.name} frame came that was not asked for")
        piece = self._in_flight.popleft()
        call, expected = piece.call, Kind.STORED if piece.call.kind is Kind.KV else Kind.KV
        if frame.kind is Kind.REFUSED:
            call.refusal = decode_refusal(self._conversation.body(frame, MAX_JSON_BYTES))[1]
        elif frame.kind is not expected:
            raise FrameError(f"a {frame.kind.name} frame came in place of {expected.name}")
        elif expected is Kind.KV:
            self._fill(piece, frame)
        elif self._conversation.body(frame, KV_STORED.size) != _stored(piece):
            raise FrameError("a STORED frame names other rows than were sent")
        call.pieces_left -= 1
        if call.pieces_left == 0:
            self._done.append(Stored(call.job_id, call.layer, call.start, call.num_rows, call.refusal))

    def _fill(self, piece: _Piece, frame: Frame) -> None:
        rows = bytearray(KV_ROWS.size)
        if frame.lengths != piece.lengths or frame.layer != piece.call.layer:
            raise FrameError(
                f"a KV frame of layer {frame.layer} with parts of {frame.lengths} bytes, not of layer "
                f"{piece.call.layer} with parts of {piece.lengths} bytes"
            )
        self._conversation.read_into(rows)
        if rows != piece.rows:
            raise FrameError("a KV frame has other rows than were asked for")
        for array in piece.arrays:
            self._conversation.read_into(array)


def _stored(piece: _Piece) -> bytes:
    return KV_STORED.pack(piece.call.job_id, piece.call.layer, piece.start, len(piece.arrays[0]))


def _check_rows(arrays: tuple[np.ndarray, ...]) -> None:
    """Raise ValueError unless k and v are C-contiguous, have three dimensions, and equal, positive row counts."""
    dimensions = {1: [2], 2: [3, 3]}.get(len(arrays))
    is_right = [each.ndim for each in arrays] == dimensions and 0 < len(arrays[0]) == len(arrays[-1])
    if not is_right or not all(each.flags.c_contiguous for each in arrays):
        raise ValueError(
            f"k and v must be C-contiguous [num_rows, num_kv_heads, head_dim] with equal num_rows, not "
            f"{' and '.join(str(each.shape) for each in arrays)}"
        )
