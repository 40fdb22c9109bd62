"""Operations that policies decide one after another. The store carries out each before the next is decided."""

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
    """Bring the rows of decoding sequences up to date, in their order."""


@dataclass(frozen=True, eq=False, slots=True)
class SetFollowersAside:
    """Take sequences out of the queue's front that wait for a prefix which another sequence computes."""


@dataclass(frozen=True, eq=False, slots=True)
class Close:
    """Release what is kept for ``sequence`` alone, since it cannot continue anywhere."""

    sequence: TokenSequence


@dataclass(frozen=True, eq=False, slots=True)
class Begin:
    """Start the head of the queue in ``segments``, from ``hit``.

    ``second``: the R-worker of a second copy; -1 for none.
    """

    sequence: TokenSequence
    segments: list[Segment]
    hit: Hit | None
    second: int = -1


@dataclass(frozen=True, eq=False, slots=True)
class Attend:
    """Choose the attending holders.

    Tails of ``rows`` attend on their second copy if ``on_second``, bool [n], is true. Closed segments ``swapped``
    attend on their other holder, which becomes their home.
    """

    rows: np.ndarray
    on_second: np.ndarray
    swapped: list[tuple[TokenSequence, Segment]]


@dataclass(frozen=True, eq=False, slots=True)
class MakeRoom:
    """Evict prefixes until R-worker ``worker`` has ``num_blocks`` free blocks. The answer is whether it has."""

    worker: int
    num_blocks: int


@dataclass(frozen=True, eq=False, slots=True)
class Grow:
    """Give each of these table rows ``num_blocks`` more blocks."""

    rows: np.ndarray
    num_blocks: int = 1


@dataclass(frozen=True, eq=False, slots=True)
class Extend:
    """Give ``sequence``, whose tail is full, a new tail on R-worker ``worker``."""

    sequence: TokenSequence
    worker: int


@dataclass(frozen=True, eq=False, slots=True)
class Preempt:
    """Take the cache of ``sequence``, and queue it by its age."""

    sequence: TokenSequence


@dataclass(frozen=True, eq=False, slots=True)
class GiveUpCopy:
    """Drop the copy of ``segment`` of ``sequence`` on R-worker ``worker``."""

    sequence: TokenSequence
    segment: Segment
    worker: int


@dataclass(frozen=True, eq=False, slots=True)
class Move:
    """Begin to move ``segment`` to R-worker ``target`` in one piece, with ``num_blocks`` blocks.

    The answer is the transfer.
    """

    sequence: TokenSequence
    segment: Segment
    target: int
    num_blocks: int


@dataclass(frozen=True, eq=False, slots=True)
class CopySegment:
    """Begin to copy ``segment`` to R-worker ``target``.

    At the end R-worker ``drops`` drops its copy; -1 for none. The answer is the transfer.
    """

    sequence: TokenSequence
    segment: Segment
    target: int
    drops: int = -1


@dataclass(frozen=True, eq=False, slots=True)
class GrowTransfer:
    """Reserve ``num_blocks`` more blocks on the target of ``transfer``."""

    transfer: Transfer
    num_blocks: int


@dataclass(frozen=True, eq=False, slots=True)
class CopyNext:
    """Set the next piece of ``transfer`` to ``num_tokens`` tokens."""

    transfer: Transfer
    num_tokens: int


@dataclass(frozen=True, eq=False, slots=True)
class DropTransfer:
    """Drop what was copied."""

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
