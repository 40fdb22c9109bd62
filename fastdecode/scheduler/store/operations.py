"""Operations: policies decide them, one after another, and the store carries each out before the next is decided."""

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
    """Bring the rows of what decodes up to date, in their order."""


@dataclass(frozen=True, eq=False, slots=True)
class SetFollowersAside:
    """Take sequences out of the queue's front that wait for a prefix which another computes."""


@dataclass(frozen=True, eq=False, slots=True)
class Close:
    """Give up what is kept for ``sequence`` alone: it goes on nowhere."""

    sequence: TokenSequence


@dataclass(frozen=True, eq=False, slots=True)
class Begin:
    """Take the head of the queue out and start it in ``segments``, from ``hit``; a second copy on R-worker ``second``,
    -1 for none."""

    sequence: TokenSequence
    segments: list[Segment]
    hit: Hit | None
    second: int = -1


@dataclass(frozen=True, eq=False, slots=True)
class Attend:
    """Choose who attends: the tails of ``rows`` on their second copy where ``on_second``, bool [n], is true, and closed
    segments ``swapped`` on their other holder, which is their home then."""

    rows: np.ndarray
    on_second: np.ndarray
    swapped: list[tuple[TokenSequence, Segment]]


@dataclass(frozen=True, eq=False, slots=True)
class MakeRoom:
    """Evict prefixes until R-worker ``worker`` has ``num_blocks`` blocks free. The answer says whether it has."""

    worker: int
    num_blocks: int


@dataclass(frozen=True, eq=False, slots=True)
class Grow:
    """Give each of these rows of the table ``num_blocks`` more blocks."""

    rows: np.ndarray
    num_blocks: int = 1


@dataclass(frozen=True, eq=False, slots=True)
class Extend:
    """Give ``sequence``, whose tail is whole, a new tail on R-worker ``worker``."""

    sequence: TokenSequence
    worker: int


@dataclass(frozen=True, eq=False, slots=True)
class Preempt:
    """Take the cache of ``sequence``, and queue it by its age."""

    sequence: TokenSequence


@dataclass(frozen=True, eq=False, slots=True)
class GiveUpCopy:
    """Have R-worker ``worker`` give up its copy of ``segment``, of ``sequence``."""

    sequence: TokenSequence
    segment: Segment
    worker: int


@dataclass(frozen=True, eq=False, slots=True)
class Move:
    """Begin to move ``segment`` to R-worker ``target``, all at once, with ``num_blocks`` blocks. The answer is the
    transfer."""

    sequence: TokenSequence
    segment: Segment
    target: int
    num_blocks: int


@dataclass(frozen=True, eq=False, slots=True)
class CopySegment:
    """Begin to copy ``segment`` to R-worker ``target``; in the end R-worker ``drops`` gives its own copy up, or none
    does. The answer is the transfer."""

    sequence: TokenSequence
    segment: Segment
    target: int
    drops: int = -1


@dataclass(frozen=True, eq=False, slots=True)
class GrowTransfer:
    """Take ``num_blocks`` more blocks on the target of ``transfer``."""

    transfer: Transfer
    num_blocks: int


@dataclass(frozen=True, eq=False, slots=True)
class CopyNext:
    """Have the next piece of ``transfer`` be of ``num_tokens`` tokens."""

    transfer: Transfer
    num_tokens: int


@dataclass(frozen=True, eq=False, slots=True)
class DropTransfer:
    """Give up what was copied so far."""

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
"""What a policy decides: it yields operations, is sent the answer of each, and returns what it was asked for."""
