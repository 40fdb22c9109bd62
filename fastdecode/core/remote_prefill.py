"""Prompts for prefill workers: what the scheduler sends them, and what they answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class PromptKV(NamedTuple):
    """Keys and values in one layer to which the rows of a prompt part attend, from the prompt's position 0 on.
    ``prefix``: uint8 [context_len, bytes], the cached tokens as R-workers store them (see ``_rworker.RWorker.export``).
    ``k``, ``v`` [rows, num_kv_heads, …]: the tokens after the prefix; 16-bit floats as uint16.
    """

    prefix: np.ndarray
    k: np.ndarray
    v: np.ndarray


@dataclass(frozen=True)
class PrefillPart:
    """Tokens ``start`` to ``end`` (exclusive) of a prompt, computed by prefill worker ``worker``."""

    worker: int
    start: int
    end: int


@dataclass(frozen=True)
class StoredAt:
    """Says that R-worker ``r_worker`` stores tokens ``start`` to ``end`` of a prompt, as its sequence ``cache_id``.
    Positions in that sequence count from ``start``. ``ticket``: the unique number under which the R-worker reserves
    blocks for these tokens.
    """

    r_worker: int
    cache_id: int
    start: int
    end: int
    ticket: int


@dataclass(frozen=True)
class RemotePrefill:
    """A prompt for prefill workers: its tokens after a cached prefix, cut into consecutive ``parts``.
    ``job_id`` and tickets are new for every attempt, so that R-workers refuse rows of earlier attempts. ``stores``: the
    R-workers that store the tokens of ``parts``; those that store the same tokens keep copies. ``prefix``: the
    R-workers that hold tokens 0 to ``context_len``, in order; each has reserved blocks, even if it stores no new token.
    ``method``: one of ``PREFILL_METHODS``. Raise ValueError for gaps in stores or prefix, and for a repeated ticket.
    """

    job_id: int
    sequence_id: int
    stores: tuple[StoredAt, ...]
    token_ids: tuple[int, ...]
    parts: tuple[PrefillPart, ...]
    prefix: tuple[StoredAt, ...] = ()
    method: str = "kvr"

    def __post_init__(self) -> None:
        places: dict[int, tuple[int, int]] = {}
        for each in (*self.stores, *self.prefix):
            place = each.r_worker, each.cache_id
            if places.setdefault(each.ticket, place) != place:
                raise ValueError(f"job {self.job_id}: ticket {each.ticket} stands for two places")
        if len({each.ticket for each in self.stores}) < len(self.stores):
            raise ValueError(f"job {self.job_id}: two of its stores have the same ticket")
        if _covered(self.prefix, 0) != self.context_len:
            raise ValueError(f"job {self.job_id}: its prefix of {self.context_len} tokens differs from {self.prefix}")
        if _covered(self.stores, self.context_len) < self.parts[-1].end:
            raise ValueError(f"job {self.job_id}: {self.stores} do not cover its {self.parts[-1].end} tokens")

    @property
    def context_len(self) -> int:
        """Number of tokens in the prefix, which R-workers have cached already."""
        return self.parts[0].start


def _covered(places: tuple[StoredAt, ...], start: int) -> int:
    """Return the first position from ``start`` on that none of ``places`` stores."""
    for each in sorted(places, key=lambda place: place.start):
        if each.start > start:
            break
        start = max(start, each.end)
    return start


@dataclass(frozen=True, eq=False)
class Prefilled:
    """A prompt that prefill workers have computed and R-workers have stored.
    ``logits``: of the last token, [vocab_size] in the model's dtype, 16-bit floats as uint16. ``seconds``: time of the
    slowest part. Bytes of keys and values: ``sent_bytes`` between prefill workers; ``stored_bytes`` to R-workers, with
    all copies; ``read_bytes`` of the prefix from R-workers. ``missed``: tickets of R-workers that could not be reached
    and lack their tokens.
    """

    sequence_id: int
    job_id: int
    logits: np.ndarray
    seconds: float
    sent_bytes: int
    stored_bytes: int
    read_bytes: int = 0
    missed: tuple[int, ...] = ()


class PrefillOutcomes(NamedTuple):
    """Computed prompts, ids of failed jobs, and prefill workers that were lost or have joined."""

    computed: list[Prefilled]
    failed: list[int]
    lost: list[int]
    joined: list[int]
