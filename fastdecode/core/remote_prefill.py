"""Prompts that prefill workers compute, as the scheduler hands them out and as they come back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class PromptKV(NamedTuple):
    """Keys and values of one layer, which the rows of a part attend to: those of a prompt from position 0 on.

    ``prefix``: uint8 [context_len, bytes], the tokens that R-workers had before, as their caches store them (see
    ``_rworker.RWorker.export``). ``k`` and ``v`` [rows, num_kv_heads, …]: those after it, in the model's dtype as numpy
    carries it.
    """

    prefix: np.ndarray
    k: np.ndarray
    v: np.ndarray


@dataclass(frozen=True)
class PrefillPart:
    """Tokens ``start`` to ``end`` of a prompt, which prefill worker ``worker`` computes."""

    worker: int
    start: int
    end: int


@dataclass(frozen=True)
class StoredAt:
    """R-worker ``r_worker`` stores tokens ``start`` to ``end`` of a prompt as its sequence ``cache_id``.

    Positions in that sequence count from ``start``. ``ticket``: the number under which it has reserved blocks for them;
    no other place has it.
    """

    r_worker: int
    cache_id: int
    start: int
    end: int
    ticket: int


@dataclass(frozen=True)
class RemotePrefill:
    """A prompt that prefill workers compute: its tokens, cut into consecutive ``parts``, except a cached prefix.

    ``job_id`` and the tickets of places are new for every attempt: an R-worker refuses rows of any other. ``stores``
    cover all tokens of ``parts``; two that overlap are two copies. ``prefix``: who has tokens 0 to ``context_len``, in
    order, one holder each; one that stores nothing has a reservation, too. ``method``: one of ``PREFILL_METHODS``.
    ValueError for stores or a prefix with gaps, and for two places with one ticket.
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
                raise ValueError(f"job {self.job_id}: two of its places have ticket {each.ticket}")
        if len({each.ticket for each in self.stores}) < len(self.stores):
            raise ValueError(f"job {self.job_id}: a place stores two ranges of it")
        if _covered(self.prefix, 0) != self.context_len:
            raise ValueError(f"job {self.job_id}: a prefix of {self.context_len} tokens is at {self.prefix}")
        if _covered(self.stores, self.context_len) < self.parts[-1].end:
            raise ValueError(f"job {self.job_id}: {self.stores} have not all {self.parts[-1].end} tokens")

    @property
    def context_len(self) -> int:
        """Tokens of the prefix, which R-workers have."""
        return self.parts[0].start


def _covered(places: tuple[StoredAt, ...], start: int) -> int:
    """Return where the first gap of ``places`` after ``start`` begins."""
    for each in sorted(places, key=lambda place: place.start):
        if each.start > start:
            break
        start = max(start, each.end)
    return start


@dataclass(frozen=True, eq=False)
class Prefilled:
    """A prompt that prefill workers have computed, and its R-workers have stored.

    ``logits`` of its last token: [vocab_size] in the model's dtype, 16-bit floats as uint16. ``seconds`` of its
    slowest part. ``sent_bytes`` of keys and values went from one prefill worker to another, ``stored_bytes`` to
    R-workers, each copy counted, and ``read_bytes`` of its prefix came from there. ``missed``: tickets of places that
    could not be reached and lack some of it, which others have.
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
    """Prompts that are computed, jobs that failed, and prefill workers that were lost and that have joined."""

    computed: list[Prefilled]
    failed: list[int]
    lost: list[int]
    joined: list[int]
