"""Prefixes parked on R-workers' disks: types and constants that S-worker and R-workers share."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple, Protocol

from fastdecode.core.types import SPLIT_TOKENS

PIECE_TOKENS = SPLIT_TOKENS
"""Tokens that are written, checked and read back as one piece of a parked prefix: a multiple of every block size."""

PARK_AFTER = 60.0
"""Default seconds without use after which a prefix is parked."""

MARK_BYTES = 16
"""Bytes kept of the hash of all tokens up to the end of a block. Prefixes are found by these bytes."""


def num_pieces(num_blocks: int, block_size: int) -> int:
    """Return the number of pieces of ``PIECE_TOKENS`` tokens in which ``num_blocks`` blocks are written."""
    return -(-num_blocks * block_size // PIECE_TOKENS)


def num_marks(num_blocks: int, block_size: int, rest: int = 0) -> int:
    """Return the number of hashes in ``Chain.marks`` for ``num_blocks`` blocks and ``rest`` more tokens."""
    return num_pieces(num_blocks, block_size) + (rest > 0)


def hash_after(before: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the hash of all tokens up to the end of ``token_ids``; ``before`` is the hash of the tokens before."""
    return hashlib.blake2b(before + array("q", token_ids).tobytes(), digest_size=MARK_BYTES).digest()


@dataclass(frozen=True)
class ParkPlace:
    """The folder where an R-worker parks prefixes, and its limits.
    ``most_bytes``: most bytes in ``folder``; None: the R-worker chooses. ``after_seconds``: time without use after
    which a prefix is parked.
    """

    folder: Path
    most_bytes: int | None = None
    after_seconds: float = PARK_AFTER

    def of(self, index: int) -> ParkPlace:
        """Return this place with a subfolder for R-worker ``index``, one of several on this machine."""
        return replace(self, folder=self.folder / f"r-worker-{index}")

    def flags(self) -> list[str]:
        """Return the flags that make ``fastdecode r-worker`` park in this place."""
        flags = ["--park-dir", str(self.folder), "--park-after", str(self.after_seconds)]
        return flags if self.most_bytes is None else [*flags, "--park-bytes", str(self.most_bytes)]


class Chain(NamedTuple):
    """A parked prefix of ``num_blocks`` blocks and, if layers are recurrent, ``rest`` tokens after them.
    ``marks``: the hash of all tokens up to the end of each piece, and of ``rest`` if any; the last names the chain.
    """

    num_blocks: int
    marks: tuple[bytes, ...]
    rest: int = 0

    @staticmethod
    def of(block_hashes: Sequence[bytes], block_size: int, rest: Sequence[int] = ()) -> Chain:
        """Return the chain of the blocks with ``block_hashes`` and of the tokens ``rest`` after them."""
        step = PIECE_TOKENS // block_size
        marks = [*block_hashes[step - 1 :: step], *(block_hashes[-1:] if len(block_hashes) % step else ())]
        if rest:
            marks.append(hash_after(block_hashes[-1], rest))
        return Chain(len(block_hashes), tuple(marks), len(rest))

    @property
    def last_block(self) -> bytes:
        """The hash of all tokens up to the end of the last block."""
        return self.marks[-2] if self.rest else self.marks[-1]

    @property
    def name(self) -> bytes:
        """The hash of all tokens of the chain, which is the chain's name."""
        return self.marks[-1]


class Progress(IntEnum):
    """The state of a request to park or to load a prefix. While it is UNDER_WAY, the caller repeats the request."""

    DONE = 0
    UNDER_WAY = 1
    FAILED = 2


class Parked(NamedTuple):
    """An R-worker's answer to a request to park or to load a prefix.
    ``num_tokens``: tokens parked or loaded. ``num_bytes``: bytes on the R-worker's disk. ``dropped``: names of chains
    that it deleted to make room.
    """

    progress: Progress
    num_tokens: int = 0
    num_bytes: int = 0
    dropped: tuple[bytes, ...] = ()


class Parks(Protocol):
    """Access to the R-workers' disks, between steps.
    Raise BackendError if an R-worker refuses, and WorkerLostError if it is lost. ``patience_ms``: about how long a call
    may take before it returns UNDER_WAY.
    """

    def chains(self, worker: int, model: str) -> list[Chain]:
        """Start parking for the model that ``model`` identifies.
        Return the chains of that model on R-worker ``worker``, least recently used first.
        """

    def park(
        self, worker: int, sequence_id: int, chain: Chain, superseded: Sequence[bytes] = (), patience_ms: int = 2
    ) -> Parked:
        """Write the blocks of ``sequence_id`` to disk as ``chain``, and delete the ``superseded`` chains.
        If layers are recurrent, the chain is the whole sequence, and its states are written too.
        """

    def wake(self, worker: int, sequence_id: int, num_blocks: int, name: bytes, patience_ms: int = 2) -> Parked:
        """Load the first ``num_blocks`` blocks of chain ``name`` as a new sequence ``sequence_id``.
        The last of these blocks must end a piece. A chain with recurrent states is loaded whole, with its ``rest``. If
        loading FAILED midway, the sequence has the tokens loaded before the failure and must be released.
        """
