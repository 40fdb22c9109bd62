"""Messages about named sessions: requests to keep caches for the next S-worker, and lists of kept sequences."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from itertools import chain
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from fastdecode.api.engine_fields import MOST_SECONDS
from fastdecode.api.settings import MAX_SESSION
from fastdecode.cluster.wire.json_bodies import Text
from fastdecode.core.errors import FrameError
from fastdecode.core.held import HeldSequence

MOST_JOURNAL_BYTES = 1 << 27
"""Most bytes of a session's journal in an R-worker's memory."""

LEASE_SECONDS = 2.0
"""An S-worker that is silent for this many seconds loses its session to the next S-worker that asks for it."""

FIRST_BYTE = struct.Struct("<q")
"""The first part of RECORD: the position in the journal of the bytes in the second part."""


class AskedLease(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request for a named session.

    The R-worker keeps its cache for ``keep_seconds`` after the link breaks. The next S-worker gets the cache if its
    ``follows`` is this ``fingerprint``: then it has the same weights and journal. ``any_run``: it is enough if the
    fingerprint begins with ``follows``, since the journal is yet to be read from R-workers. ``epoch``: this S-worker's
    epoch on the R-worker; 0 for none. ``waits``: take the session only from a stopped S-worker, not from a silent one.
    """

    session: Annotated[str, Meta(min_length=1, max_length=MAX_SESSION)]
    fingerprint: Text
    follows: Text
    keep_seconds: Annotated[float, Meta(ge=0, le=MOST_SECONDS)]
    epoch: Annotated[int, Meta(ge=0, le=1 << 62)] = 0
    waits: bool = False
    any_run: bool = False


def encode_held(held: Iterable[HeldSequence]) -> bytes:
    """Return the HELD body, int64: each ``HeldSequence``'s cache_id, num_tokens, least, number of blocks, blocks."""
    rows = ((each.cache_id, each.num_tokens, each.least, len(each.blocks), *each.blocks) for each in held)
    return np.fromiter(chain.from_iterable(rows), "<i8").tobytes()


def decode_held(data: bytes | bytearray, num_blocks: int, block_size: int) -> tuple[HeldSequence, ...]:
    """Return the sequences in ``data`` of an R-worker with ``num_blocks`` blocks.

    Raise FrameError for sequences that such an R-worker cannot hold.
    """
    if len(data) % 8:
        raise FrameError(f"HELD: {len(data)} bytes, which is no multiple of 8")
    numbers = np.frombuffer(data, "<i8").tolist()
    found: dict[int, HeldSequence] = {}
    start = 0
    # How many numbers a sequence has in HELD before its blocks
    head_numbers = 4
    while start < len(numbers):
        head = numbers[start : start + head_numbers]
        cache_id, num_tokens, least, count = head if len(head) == head_numbers else (0, -1, 0, -1)
        blocks = tuple(numbers[start + head_numbers : start + head_numbers + max(count, 0)])
        enough = 0 <= num_tokens <= len(blocks) * block_size and len(blocks) == count == len(set(blocks))
        enough &= 0 <= least <= num_tokens + 1
        if not enough or cache_id in found or not all(0 <= block < num_blocks for block in blocks):
            raise FrameError(f"HELD: entry {len(found)} is no sequence that an R-worker can hold")
        found[cache_id] = HeldSequence(cache_id, num_tokens, blocks, least)
        start += head_numbers + count
    return tuple(found.values())
