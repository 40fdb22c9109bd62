"""The wire format: a message is a fixed header and at most three parts, whose lengths are in the header.

Header, little-endian, 56 bytes::

magic "FDRW" | version u16 | kind u16 | epoch u64 | sequence u64 | mini_batch u32 | layer u32 | length u64 × 3

``epoch`` is 0 until the R-worker's WELCOME draws one for the session. ``sequence`` grows with each frame of one
direction. So the receiver notices a frame of another session, a replayed one and a late one. (The sender skips a number
if Ctrl-C interrupts it between numbering a frame and sending it.) Integers in bodies are little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

from fastdecode.core.errors import FrameError

MAGIC = b"FDRW"
VERSION = 33
HEADER = struct.Struct("<4sHHQQII3Q")

FRAME_LIMIT = 1 << 28
"""Most bytes of one part. A peer that announces more is refused before anything is allocated."""


class Kind(IntEnum):
    """The kind of a frame, with its parts."""

    HELLO = 1  # from the S-worker: name, layout, block size (JSON)
    WELCOME = 2  # from the R-worker: description of the R-worker (JSON)
    PING = 3  # from the S-worker, without a body
    PONG = 4  # from the R-worker: time on the R-worker's clock (float64 seconds)
    PLAN = 5  # from the S-worker: controls and spans of a step
    READY = 6  # from the R-worker: answers PLAN, IMPORT and WEIGHTS
    PAYLOAD = 7  # from the S-worker: q, k, v of a layer of a mini-batch, in the order and places of `payload.py`
    OUTPUT = 8  # from the R-worker: o and any partial results of a PAYLOAD's layer, placed as in `payload.py`
    END = 9  # from the S-worker, without a body
    REPORT = 10  # from the R-worker: busy times, bytes read, blocks free
    ABANDON = 11  # from the S-worker, without a body
    ABANDONED = 12  # from the R-worker, without a body
    EXPORT = 13  # from the S-worker: sequence id, first token, number of tokens
    EXPORTED = 14  # from the R-worker: number of bytes, which follow as DATA
    IMPORT = 15  # from the S-worker: sequence id, first token, numbers of tokens and bytes; DATA follows after READY
    IMPORTED = 16  # from the R-worker, without a body
    DATA = 17  # from either side: the next bytes of a sequence
    REFUSED = 18  # from the R-worker: reason (JSON)
    BYE = 19  # from the S-worker: the session is over
    JOIN = 20  # from the R-worker, outside a session: the address at which it listens (JSON)
    CHALLENGE = 21  # from the S-worker, before HELLO: a nonce (see handshake.py)
    CHALLENGED = 22  # from the R-worker: a nonce and a proof of the key
    PROOF = 23  # from the S-worker: a proof of the key
    PROVEN = 24  # from the R-worker: the proof is right, and HELLO may follow
    KV = 25  # from a prefill worker, to a port: job, first token, number of rows; k and v of a layer
    STORED = 26  # from a port, answers KV: job, layer, first token, number of rows
    PROMPT = 27  # from the S-worker, to a prefill worker: a part of a prompt (JSON), and its tokens
    PREFILLED = 28  # from a prefill worker: a part is computed and stored: seconds, bytes sent, logits
    FAILED = 29  # from a prefill worker: why a part was not computed (JSON)
    CANCEL = 30  # from the S-worker: cancels a job
    READ = 31  # from a prefill worker, to a KV port, which answers KV: job, first token, number of rows of a prefix
    PICKS = 32  # from the S-worker: how many tokens that an index layer ranked are picked, for each row (int32)
    PARKING = 33  # from the S-worker: name of the model whose caches may be parked (JSON)
    CHAINS = 34  # from the R-worker: the parked chains of that model
    PARK = 35  # from the S-worker: sequence id, chain, names of superseded chains; sent again while under way
    WAKE = 36  # from the S-worker: sequence id, number of blocks, name of the chain; sent again while under way
    PARKED = 37  # from the R-worker: progress of a PARK or a WAKE
    INVENTORY = 38  # from the S-worker: asks what the R-worker holds
    HELD = 39  # from the R-worker: ids, lengths and blocks of its sequences (int64)
    WEIGHTS = 40  # from the S-worker: first head (int64); K and V of some heads of a latent layer, in the model's dtype
    RECORD = 41  # from the S-worker: first byte (int64), bytes of the session's journal; byte 0 begins a new journal
    RECORDED = 42  # from the R-worker: bytes that the journal has now (int64)
    RECALL = 43  # from the S-worker: asks for the session's journal, which an earlier S-worker may have written
    RECALLED = 44  # from the R-worker: the journal
    WEIGH = 45  # from the S-worker, after a step's last layer: a row (int64); its q by layer; max and sum of scores
    WEIGHED = 46  # from the R-worker: attention weight of each block of tokens, or max and sum of scores (float32)
    AUDIT = 47  # from the S-worker, after a step's last layer: questions about rows (int64), and their q
    AUDITED = 48  # from the R-worker: whether blocks differ from checksums (uint8); o, partial results, or k and v


@dataclass(frozen=True)
class Frame:
    """A checked header; the parts are not read yet."""

    kind: Kind
    epoch: int
    sequence: int
    mini_batch: int
    layer: int
    lengths: tuple[int, int, int]


class Channel(Protocol):
    """Whole messages to and from one peer, in order. Raise ConnectionError, with the reason, once the peer is gone."""

    def send(self, parts: Sequence[Any]) -> None:
        """Send a header and its parts: C-contiguous buffers that must not change until the peer has answered."""

    def receive(self, timeout_seconds: float) -> bytes | None:
        """Return the next message's first part; None if none came in time.

        Unread parts of the last message are dropped.
        """

    def read_into(self, buffer: Any) -> None:
        """Fill ``buffer`` from the message's next part. Raise FrameError unless it has that length."""

    def close(self) -> None:
        """Close the channel; may be called twice."""


class Conversation:
    """Numbered frames over one channel.

    A frame of another session, or out of order, is refused. ``next_sent``: the number of the next frame to send.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.read_into = channel.read_into
        self.epoch = 0
        self.next_sent = self._least_received = 0

    def send(self, kind: Kind, *parts: Any, mini_batch: int = 0, layer: int = 0) -> None:
        """Send one frame; the parts are C-contiguous buffers."""
        lengths = [memoryview(part).nbytes for part in parts]
        if max(lengths, default=0) > FRAME_LIMIT:
            raise FrameError(f"a part of {max(lengths):,} bytes is more than a frame may hold ({FRAME_LIMIT:,})")
        header = self._header(kind, mini_batch, layer, lengths)
        self.next_sent += 1
        self.channel.send([header, *parts])

    def receive(self, timeout_seconds: float) -> Frame | None:
        """Return the next frame; None if none came in time.

        Raise FrameError for a malformed frame, or one of another session.
        """
        header = self.channel.receive(timeout_seconds)
        if header is None:
            return None
        frame = decode(header)
        if frame.kind is Kind.WELCOME and self.epoch == 0:
            self.epoch = frame.epoch
        if frame.epoch != self.epoch:
            raise FrameError(f"a {frame.kind.name} frame of another session (epoch {frame.epoch:#x})")
        self.check_order(frame)
        return frame

    def check_order(self, frame: Frame) -> None:
        """Raise FrameError if the frame's number was received before, or is far above the next expected number."""
        if frame.sequence < self._least_received:
            raise FrameError(
                f"a {frame.kind.name} frame that came before: number {frame.sequence}, not {self._least_received}"
            )
        # Most numbers that a sender may skip. A huge number must not pass: all later frames would seem received before.
        most_skipped = 1 << 16
        if frame.sequence - self._least_received > most_skipped:
            raise FrameError(
                f"a {frame.kind.name} frame from far ahead: number {frame.sequence}, not {self._least_received}"
            )
        self._least_received = frame.sequence + 1

    def body(self, frame: Frame, most_bytes: int = FRAME_LIMIT) -> bytearray:
        """Return the only part of ``frame``.

        Raise FrameError if the frame has several parts, or one part of more than ``most_bytes`` bytes.
        """
        if frame.lengths[0] > most_bytes or any(frame.lengths[1:]):
            raise FrameError(f"a {frame.kind.name} frame with parts of {frame.lengths} bytes; {most_bytes:,} at most")
        data = bytearray(frame.lengths[0])
        self.read_into(data)
        return data

    def _header(self, kind: Kind, mini_batch: int, layer: int, lengths: Sequence[int]) -> bytes:
        max_parts = 3
        padded = (*lengths, *(0,) * (max_parts - len(lengths)))
        return HEADER.pack(MAGIC, VERSION, kind, self.epoch, self.next_sent, mini_batch, layer, *padded)


def decode(header: bytes) -> Frame:
    """Check every field of a header and return the frame. A FrameError names the wrong field."""
    if len(header) != HEADER.size:
        raise FrameError(f"a frame whose header has {len(header)} bytes, not {HEADER.size}")
    magic, version, kind, epoch, sequence, mini_batch, layer, *lengths = HEADER.unpack(header)
    if magic != MAGIC:
        raise FrameError("a frame that is not FastDecode's: its magic is wrong")
    if version != VERSION:
        raise FrameError(f"a frame of protocol version {version}; this side speaks {VERSION}")
    kinds = frozenset(Kind)
    if kind not in kinds:
        raise FrameError(f"a frame of unknown kind {kind}")
    if max(lengths) > FRAME_LIMIT:
        raise FrameError(f"a frame that announces {max(lengths):,} bytes; {FRAME_LIMIT:,} is the limit")
    return Frame(Kind(kind), epoch, sequence, mini_batch, layer, (lengths[0], lengths[1], lengths[2]))
