"""The format of a journal: records in a chain of checksums, which shows where the first damaged record begins.

A file is ``MAGIC`` and then records. Each record has a head and a body in MessagePack. The head has the length of the
body, and a CRC-32 of length and body, continued from the previous record. An interrupted write, a flipped bit, or bytes
of another file end the chain. A reader keeps the complete steps before the chain's end, and ignores what follows.
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
"""Pairs of a sequence id and its token ids."""

TokenLogprobs = list[dict[int, tuple[float, int]]]
"""Candidate token ids of each output token, with their log-probability and rank."""


@dataclass(frozen=True)
class Run:
    """One engine run that writes a journal. ``name`` is unique; ``before``: the previous run's name ("" for none)."""

    name: str
    before: str


class Began(msgspec.Struct, frozen=True, array_like=True, tag="began"):
    """The first record.
    ``fingerprint``: hash of the model, dtype and seed. ``run``: the name of the run that wrote last. Among several
    copies of a journal, the newest has the highest session ``epoch``; among equal epochs, the highest ``edition``,
    which counts rewrites.
    """

    fingerprint: str
    run: str
    epoch: int = 0
    edition: int = 0


class Asked(msgspec.Struct, frozen=True, array_like=True, tag="asked"):
    """A new request. Its samples have consecutive sequence ids from ``sequence_id`` on.
    ``params``: fields of ``SamplingParams`` that differ from the default.
    """

    sequence_id: int
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: dict[str, Any]


class Stepped(msgspec.Struct, frozen=True, array_like=True, tag="stepped"):
    """A committed step: output token ids by sequence id, and log-probabilities if requested.
    ``ended``: ids of sequences that have ended, with finish reason and stop reason.
    """

    tokens: Tokens
    logprobs: list[tuple[int, TokenLogprobs]] = []
    ended: list[tuple[int, str, int | str | None]] = []


class Dropped(msgspec.Struct, frozen=True, array_like=True, tag="dropped"):
    """A record that the request whose first sequence is ``sequence_id`` was aborted."""

    sequence_id: int


class Placed(msgspec.Struct, frozen=True, array_like=True, tag="placed"):
    """Cache ids of sequences cached under other ids than their own, and how many prompt tokens are correctly cached."""

    named: list[Named]
    reached: list[Reached]


class Kept(msgspec.Struct, frozen=True, array_like=True, tag="kept"):
    """Data that the journal keeps for a later engine under ``name``, without interpreting it.
    ``seconds``: Unix time of writing.
    """

    name: str
    seconds: float
    data: bytes


class Forgot(msgspec.Struct, frozen=True, array_like=True, tag="forgot"):
    """A record that the data kept under ``name`` was dropped."""

    name: str


Record = Began | Asked | Stepped | Dropped | Placed | Kept | Forgot

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


class Chain:
    """The checksum chain of a journal. ``checksum``: of the last record. ``num_bytes``: length with ``MAGIC``."""

    def __init__(self, num_bytes: int = 0, checksum: int = 0) -> None:
        self.num_bytes, self.checksum = num_bytes, checksum

    def encode(self, records: Iterable[Record]) -> bytes:
        """Return the encoded ``records`` to append to the journal, with ``MAGIC`` first if the journal is empty."""
        parts = [] if self.num_bytes else [MAGIC]
        for record in records:
            body = _encoder.encode(record)
            self.checksum = _checksum(len(body), body, self.checksum)
            parts += [_HEAD.pack(len(body), self.checksum), body]
        data = b"".join(parts)
        self.num_bytes += len(data)
        return data


def read(data: bytes) -> tuple[list[Record], Chain]:
    """Return the valid records at the beginning of ``data``, and the ``Chain`` with which to append more."""
    records, chain = [], Chain()
    if data.startswith(MAGIC):
        chain.num_bytes = len(MAGIC)
        for record, checksum, end in _whole(memoryview(data)):
            records.append(record)
            chain = Chain(end, checksum)
    return records, chain


def kept_in(records: Iterable[Record]) -> dict[str, Kept]:
    """Return the data kept by ``records``, by name, oldest first."""
    found: dict[str, Kept] = {}
    for record in records:
        if isinstance(record, Kept | Forgot):
            found.pop(record.name, None)
        if isinstance(record, Kept):
            found[record.name] = record
    return found


def _whole(data: memoryview) -> Iterator[tuple[Record, int, int]]:
    """Yield each record of a journal file, its checksum and end offset, up to the first damaged record."""
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
        except msgspec.DecodeError:  # a later version wrote the journal, with records unknown here
            return
        start += length
        yield record, checksum, start


def _checksum(length: int, body: bytes | memoryview, before: int) -> int:
    return zlib.crc32(body, zlib.crc32(_LENGTH.pack(length), before))
