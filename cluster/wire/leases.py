"""What an S-worker asks to be kept for the one after it, and what an R-worker has of one before."""

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
"""Of a session's journal in an R-worker's memory."""

LEASE_SECONDS = 2.0
"""An S-worker that is silent for so long loses its session to the next one that asks."""

FIRST_BYTE = struct.Struct("<q")
"""The first part of RECORD: where in the journal the bytes of the second part lie."""


class AskedLease(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A named session. What is kept for ``keep_seconds`` after its link breaks is for an S-worker that ``follows`` the
    ``fingerprint`` of the one before: it has the same weights, and that one's journal. ``any_run``: R-workers have the
    journal, so the S-worker does not know yet which run it follows: the fingerprint before may be any that begins with
    ``follows``. ``epoch``: the one that the S-worker has here already, 0: none yet. ``waits``: until the one before is
    gone; else that gives way when it is silent."""

    session: Annotated[str, Meta(min_length=1, max_length=MAX_SESSION)]
    fingerprint: Text
    follows: Text
    keep_seconds: Annotated[float, Meta(ge=0, le=MOST_SECONDS)]
    epoch: Annotated[int, Meta(ge=0, le=1 << 62)] = 0
    waits: bool = False
    any_run: bool = False


def encode_held(held: Iterable[HeldSequence]) -> bytes:
    """Return for each sequence its id, tokens, the fewest that it can be cut to, and number of blocks, then these:
    int64."""
    rows = ((each.cache_id, each.num_tokens, each.least, len(each.blocks), *each.blocks) for each in held)
    return np.fromiter(chain.from_iterable(rows), "<i8").tobytes()


def decode_held(data: bytes | bytearray, num_blocks: int, block_size: int) -> tuple[HeldSequence, ...]:
    """Of an R-worker with ``num_blocks`` blocks. Raise FrameError for what it cannot hold."""
    if len(data) % 8:
        raise FrameError(f"HELD: {len(data)} bytes")
    numbers = np.frombuffer(data, "<i8").tolist()
    found: dict[int, HeldSequence] = {}
    start = 0
    # Of a sequence in HELD, before its blocks
    head_numbers = 4
    while start < len(numbers):
        head = numbers[start : start + head_numbers]
        cache_id, num_tokens, least, count = head if len(head) == head_numbers else (0, -1, 0, -1)
        blocks = tuple(numbers[start + head_numbers : start + head_numbers + max(count, 0)])
        enough = 0 <= num_tokens <= len(blocks) * block_size and len(blocks) == count == len(set(blocks))
        enough &= 0 <= least <= num_tokens + 1
        if not enough or cache_id in found or not all(0 <= block < num_blocks for block in blocks):
            raise FrameError(f"HELD: number {len(found)} is no sequence that an R-worker can hold")
        found[cache_id] = HeldSequence(cache_id, num_tokens, blocks, least)
        start += head_numbers + count
    return tuple(found.values())
