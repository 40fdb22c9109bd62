"""The format of a journal: records in a chain of checksums, so that all up to the first damage is true.

A file is ``MAGIC`` and then records. Each has a head (the length of its body, and a CRC-32 of that length and the body,
continued from the record before) and a body in MessagePack. A write that was broken off, a flipped bit, or bytes of
another file end the chain: what is before is whole steps, and what follows is not read.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from fastdecode.core.held import Named, Reached

MAGIC = b"FastDecode journal 1\n"

_HEAD = struct.Struct("<II")
_LENGTH = struct.Struct("<I")

Tokens = list[tuple[int, list[int]]]
"""Sequence ids, each with token ids."""

TokenLogprobs = list[dict[int, tuple[float, int]]]
"""For each token the log-probabilities and ranks that were asked for, by token id."""


@dataclass(frozen=True)
class Run:
    """One engine's time with a journal, by a name that no other has, and the run ``before`` it ("": none)."""

    name: str
    before: str


class Began(msgspec.Struct, frozen=True, array_like=True, tag="began"):
    """The first record; ``fingerprint``: of all that tokens depend on beside their requests; ``run``: the name of the
    engine's run that wrote last. Of several copies that of the latest ``epoch`` of a session counts, and in it the last
    ``edition``, which is counted each time that all is written anew."""

    fingerprint: str
    run: str
    epoch: int = 0
    edition: int = 0


class Asked(msgspec.Struct, frozen=True, array_like=True, tag="asked"):
    """A request has come; its samples are the sequences from ``sequence_id`` on. ``params``: those fields of
    ``SamplingParams`` that are not as by default."""

    sequence_id: int
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: dict[str, Any]


class Stepped(msgspec.Struct, frozen=True, array_like=True, tag="stepped"):
    """A step was committed: output tokens by sequence, and their log-probabilities where these were asked for.

    ``ended``: sequences that got no more, with finish reason and stop reason.
    """

    tokens: Tokens
    logprobs: list[tuple[int, TokenLogprobs]] = []
    ended: list[tuple[int, str, int | str | None]] = []


class Dropped(msgspec.Struct, frozen=True, array_like=True, tag="dropped"):
    """The request whose first sequence is ``sequence_id`` was aborted."""

    sequence_id: int


class Placed(msgspec.Struct, frozen=True, array_like=True, tag="placed"):
    """Where R-workers have tokens under other names than their sequence's, and how much of prompts is right there."""

    named: list[Named]
    reached: list[Reached]


class Kept(msgspec.Struct, frozen=True, array_like=True, tag="kept"):
    """``data``, which means nothing to an engine, is to outlive it under ``name``; since ``seconds`` of Unix."""

    name: str
    seconds: float
    data: bytes


class Forgot(msgspec.Struct, frozen=True, array_like=True, tag="forgot"):
    """What was kept under ``name`` is not wanted any more."""

    name: str


Record = Began | Asked | Stepped | Dropped | Placed | Kept | Forgot

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


class Chain:
    """Writes records; ``checksum`` is the last one's, ``num_bytes`` the length of all so far, ``MAGIC`` included."""

    def __init__(self, num_bytes: int = 0, checksum: int = 0) -> None:
        self.num_bytes, self.checksum = num_bytes, checksum

    def encode(self, records: Iterable[Record]) -> bytes:
        """Return the bytes that are to follow those so far."""
        parts = [] if self.num_bytes else [MAGIC]
        for record in records:
            body = _encoder.encode(record)
            self.checksum = _checksum(len(body), body, self.checksum)
            parts += [_HEAD.pack(len(body), self.checksum), body]
        data = b"".join(parts)
        self.num_bytes += len(data)
        return data


def read(data: bytes) -> tuple[list[Record], Chain]:
    """Return the whole records at the beginning of ``data``, and the chain that goes on after them."""
    records, chain = [], Chain()
    if data.startswith(MAGIC):
        chain.num_bytes = len(MAGIC)
        for record, checksum, end in _whole(memoryview(data)):
            records.append(record)
            chain = Chain(end, checksum)
    return records, chain


def kept_in(records: Iterable[Record]) -> dict[str, Kept]:
    """Return what is kept by ``records``, by name, the oldest first."""
    found: dict[str, Kept] = {}
    for record in records:
        if isinstance(record, Kept | Forgot):
            found.pop(record.name, None)
        if isinstance(record, Kept):
            found[record.name] = record
    return found


def _whole(data: memoryview) -> Iterator[tuple[Record, int, int]]:
    """Yield each record with its checksum and its end, up to the first that is not as it was written."""
    start, checksum = len(MAGIC), 0
    while start + _HEAD.size <= len(data):
        length, expected = _HEAD.unpack_from(data, start)
        start += _HEAD.size
        body = data[start : start + length]
        checksum = _checksum(length, body, checksum)
        if len(body) < length or checksum != expected:
            return
        try:
            record = _decoder.decode(body)
        except msgspec.DecodeError:  # of a later version of this format
            return
        start += length
        yield record, checksum, start


def _checksum(length: int, body: bytes | memoryview, before: int) -> int:
    return zlib.crc32(body, zlib.crc32(_LENGTH.pack(length), before))
