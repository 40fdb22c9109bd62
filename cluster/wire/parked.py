"""Encodes, decodes and checks the bodies of frames about parked chains."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from fastdecode.cluster.wire.json_bodies import decode_json, encode_json
from fastdecode.core.errors import FrameError
from fastdecode.core.parked import MARK_BYTES, Chain, Parked, Progress, num_marks

MAX_PARK_BYTES = 1 << 24
"""Most bytes of a PARK or a PARKED, which have 16 bytes per 512 tokens and per dropped chain."""

MAX_BLOCKS = 1 << 31

_PARK = struct.Struct("<qqqqq")
"""The beginning of PARK: patience, sequence id, numbers of blocks, of tokens after them and of superseded chains; marks
and names follow.

Patience, also in WAKE, is how long the R-worker may take before it reports progress, in milliseconds.
"""

WAKE = struct.Struct(f"<qqq{MARK_BYTES}s")
"""The body of WAKE: patience, the new sequence id, number of blocks, the chain's name."""

_PARKED = struct.Struct("<qqqq")
"""The beginning of PARKED: progress, tokens done, bytes on the disk, number of dropped chains; their names follow."""


class _Parking(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: Annotated[str, Meta(min_length=1, max_length=4096)]


def encode_parking(model: str) -> bytes:
    """Return a PARKING. ``model`` identifies the weights, and how the S-worker computes with them."""
    return encode_json(_Parking(model))


def decode_parking(data: bytes | bytearray) -> str:
    """Return the model's name. Raise FrameError if ``data`` is no PARKING."""
    return decode_json("PARKING", data, _Parking).model


def encode_park(patience_ms: int, sequence_id: int, chain: Chain, superseded: Sequence[bytes]) -> bytes:
    """Return a PARK. ``superseded``: names of chains that ``chain`` contains."""
    start = _PARK.pack(patience_ms, sequence_id, chain.num_blocks, chain.rest, len(superseded))
    return b"".join((start, *chain.marks, *superseded))


def decode_park(data: bytes | bytearray, block_size: int) -> tuple[int, int, Chain, tuple[bytes, ...]]:
    """Return the time limit in ms, sequence id, chain and names. Raise FrameError unless they fill ``data``."""
    patience_ms, sequence_id, num_blocks, rest, num_names = _start("PARK", _PARK, data)
    _check_patience("PARK", patience_ms)
    if not 1 <= num_blocks <= MAX_BLOCKS or not 0 <= rest < block_size or not 0 <= num_names <= len(data):
        raise FrameError(f"PARK: impossible: {num_blocks} blocks, {rest} tokens after them and {num_names} names")
    names = _names("PARK", data, _PARK.size, num_marks(num_blocks, block_size, rest) + num_names)
    chain = Chain(num_blocks, names[: len(names) - num_names], rest)
    return patience_ms, sequence_id, chain, names[len(names) - num_names :]


def decode_wake(data: bytes | bytearray) -> tuple[int, int, int, bytes]:
    """Return time limit in ms, sequence id, number of blocks and name. Raise FrameError unless they fill ``data``."""
    if len(data) != WAKE.size:
        raise FrameError(f"WAKE: {len(data)} bytes, not {WAKE.size}")
    patience_ms, sequence_id, num_blocks, name = WAKE.unpack(data)
    _check_patience("WAKE", patience_ms)
    return patience_ms, sequence_id, num_blocks, name


def encode_parked(parked: Parked) -> bytes:
    """Return the body of PARKED, which tells the progress of a PARK or a WAKE."""
    return b"".join(
        (_PARKED.pack(parked.progress, parked.num_tokens, parked.num_bytes, len(parked.dropped)), *parked.dropped)
    )


def decode_parked(data: bytes | bytearray) -> Parked:
    """Return the PARKED message in ``data``. Raise FrameError for an unknown progress or a wrong length."""
    progress, num_tokens, num_bytes, num_names = _start("PARKED", _PARKED, data)
    if progress not in set(Progress) or num_tokens < 0 or num_bytes < 0 or not 0 <= num_names <= len(data):
        wrong = f"progress {progress}, {num_tokens} tokens, {num_bytes} bytes, {num_names} names"
        raise FrameError(f"PARKED: impossible: {wrong}")
    return Parked(Progress(progress), num_tokens, num_bytes, _names("PARKED", data, _PARKED.size, num_names))


def encode_chains(chains: Sequence[Chain]) -> bytes:
    """Return the number of chains, each chain's ``num_blocks`` and ``rest`` (int64), and the marks of all chains."""
    sizes = [number for chain in chains for number in (chain.num_blocks, chain.rest)]
    start = np.array([len(chains), *sizes], "<i8").tobytes()
    return b"".join((start, *(mark for chain in chains for mark in chain.marks)))


def decode_chains(data: bytes | bytearray, block_size: int) -> list[Chain]:
    """Return the parked chains. Raise FrameError unless they fill ``data``."""
    num_chains = int(np.frombuffer(data[:8], "<i8")[0]) if len(data) >= 8 else -1
    if not 0 <= num_chains <= len(data) // (16 + MARK_BYTES):
        raise FrameError(f"CHAINS: {num_chains} chains do not fit {len(data)} bytes")
    sizes = np.frombuffer(data, "<i8", 2 * num_chains, 8).reshape(-1, 2).tolist()
    if wrong := [size for size in sizes if not 1 <= size[0] <= MAX_BLOCKS or not 0 <= size[1] < block_size]:
        blocks, rest = wrong[0]
        raise FrameError(f"CHAINS: a chain of {blocks} blocks and {rest} tokens, not 0 to {block_size - 1}, after them")
    counts = [num_marks(num_blocks, block_size, rest) for num_blocks, rest in sizes]
    marks = iter(_names("CHAINS", data, 8 + 16 * num_chains, sum(counts)))
    each = zip(sizes, counts, strict=True)
    return [Chain(num_blocks, tuple(islice(marks, count)), rest) for (num_blocks, rest), count in each]


def _check_patience(kind: str, patience_ms: int) -> None:
    most_patience_ms = 1000
    if not 0 <= patience_ms <= most_patience_ms:
        raise FrameError(f"{kind}: a time limit of {patience_ms} ms; {most_patience_ms} at most")


def _start(kind: str, form: struct.Struct, data: bytes | bytearray) -> tuple[int, ...]:
    if len(data) < form.size:
        raise FrameError(f"{kind}: {len(data)} bytes; at least {form.size} are needed")
    return form.unpack_from(data)


def _names(kind: str, data: bytes | bytearray, start: int, count: int) -> tuple[bytes, ...]:
    """Return ``count`` marks that fill ``data`` from ``start`` on."""
    if len(data) != start + count * MARK_BYTES:
        raise FrameError(f"{kind}: {len(data)} bytes, not {start + count * MARK_BYTES}")
    places: Iterable[int] = range(start, len(data), MARK_BYTES)
    return tuple(bytes(data[place : place + MARK_BYTES]) for place in places)
