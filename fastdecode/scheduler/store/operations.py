"""Operations that policies ask for, one after another. The store carries out each before the policy continues."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from fastdecode.scheduler.places.place import Segment
from fastdecode.scheduler.prefix.source import Hit
from fastdecode.scheduler.sequence import TokenSequence
from fastdecode.scheduler.store.holdings import Transfer


@dataclass(frozen=True, eq=False, slots=True)
class Refresh:
    """Update the sequence table's rows of decoding sequences, and restore their order."""


@dataclass(frozen=True, eq=False, slots=True)
class SetFollowersAside:
    """Set aside the sequences at the front of the queue that must wait until another sequence computes their prefix."""


@dataclass(frozen=True, eq=False, slots=True)
class Close:
    """Release the prefixes that are kept only for ``sequence``, which can no longer continue from them."""

    sequence: TokenSequence


@dataclass(frozen=True, eq=False, slots=True)
class Begin:
    """Start ``sequence``, the first in the queue, in ``segments``, from the cached prefix ``hit``.
    ``second``: the R-worker of a second copy; -1 for none.
    """

    sequence: TokenSequence
    segments: list[Segment]
    hit: Hit | None
    second: int = -1


@dataclass(frozen=True, eq=False, slots=True)
class Attend:
    """Set which of its two copies each segment attends to in the next step.
    ``rows``: table rows of sequences whose last segment attends to its second copy if ``on_second``, bool [n], is true.
    ``swapped``: full segments that attend to their other copy, which becomes the first.
    """

    rows: np.ndarray
    on_second: np.ndarray
    swapped: list[tuple[TokenSequence, Segment]]


@dataclass(frozen=True, eq=False, slots=True)
class MakeRoom:
    """Evict prefixes until R-worker ``worker`` has ``num_blocks`` free blocks; answer False if impossible."""

    worker: int
    num_blocks: int


@dataclass(frozen=True, eq=False, slots=True)
class Grow:
    """Reserve ``num_blocks`` more blocks for the sequence of each table row in ``rows``."""

    rows: np.ndarray
    num_blocks: int = 1


@dataclass(frozen=True, eq=False, slots=True)
class Extend:
    """Give ``sequence``, whose last segment is full, a new segment on R-worker ``worker``."""

    sequence: TokenSequence
    worker: int


@dataclass(frozen=True, eq=False, slots=True)
class Preempt:
    """Drop the cache of ``sequence``, and queue it by its age."""

    sequence: TokenSequence


@dataclass(frozen=True, eq=False, slots=True)
class GiveUpCopy:
    """Drop the copy of ``segment`` of ``sequence`` on R-worker ``worker``."""

    sequence: TokenSequence
    segment: Segment
    worker: int


@dataclass(frozen=True, eq=False, slots=True)
class Move:
    """Begin to move ``segment`` to R-worker ``target``, as a single piece, with ``num_blocks`` blocks.
    The answer is the transfer.
    """

    sequence: TokenSequence
    segment: Segment
    target: int
    num_blocks: int


@dataclass(frozen=True, eq=False, slots=True)
class CopySegment:
    """Begin to make another copy of ``segment``, on R-worker ``target``.
    At the end R-worker ``drops`` drops its copy; -1 for none. The answer is the transfer.
    """

    sequence: TokenSequence
    segment: Segment
    target: int
    drops: int = -1


@dataclass(frozen=True, eq=False, slots=True)
class GrowTransfer:
    """Reserve ``num_blocks`` more blocks on the R-worker to which ``transfer`` copies a segment."""

    transfer: Transfer
    num_blocks: int


@dataclass(frozen=True, eq=False, slots=True)
class CopyNext:
    """Set the length of the next piece that ``transfer`` copies to ``num_tokens`` tokens."""

    transfer: Transfer
    num_tokens: int


@dataclass(frozen=True, eq=False, slots=True)
class DropTransfer:
    """Drop the tokens that ``transfer`` has copied, and end it."""

    transfer: Transfer


Operation = (
    Refresh
    | SetFollowersAside
    | Close
    | Begin
    | Attend
    | MakeRoom
    | Grow
    | Extend
    | Preempt
    | GiveUpCopy
    | Move
    | CopySegment
    | GrowTransfer
    | CopyNext
    | DropTransfer
)

T = TypeVar("T")
Decision = Generator[Operation, Any, T]
"""A policy's decision: a generator that yields operations, receives each answer, and returns its result."""
