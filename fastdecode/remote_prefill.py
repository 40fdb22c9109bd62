"""Prompts that prefill workers compute, as the scheduler hands them out and as they come back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True)
class PrefillPart:
    """Tokens ``start`` to ``end`` of a prompt, which prefill worker ``worker`` computes."""

    worker: int
    start: int
    end: int


@dataclass(frozen=True)
class RemotePrefill:
    """A prompt that prefill workers compute: its tokens, cut into consecutive ``parts``, but for a cached prefix.

    ``job_id`` is new for every attempt: the R-worker ``r_worker`` has reserved blocks under it, and refuses rows of any
    other. ``method``: one of ``PREFILL_METHODS``.
    """

    job_id: int
    sequence_id: int
    r_worker: int
    token_ids: tuple[int, ...]
    parts: tuple[PrefillPart, ...]
    method: str = "kvr"

    @property
    def context_len(self) -> int:
        """Tokens of the prefix, which the R-worker has."""
        return self.parts[0].start


@dataclass(frozen=True, eq=False)
class Prefilled:
    """A prompt that prefill workers have computed, and its R-worker has stored.

    ``logits``: of its last token, [vocab_size] in the model's dtype, 16-bit floats as uint16. ``seconds``: of its
    slowest part. ``sent_bytes`` of keys and values went from one prefill worker to another, ``stored_bytes`` to the
    R-worker, and ``read_bytes`` of its prefix came from there.
    """

    sequence_id: int
    job_id: int
    logits: np.ndarray
    seconds: float
    sent_bytes: int
    stored_bytes: int
    read_bytes: int = 0


class PrefillOutcomes(NamedTuple):
    """Prompts that are computed, jobs that failed, and prefill workers that were lost and that have joined."""

    computed: list[Prefilled]
    failed: list[int]
    lost: list[int]
    joined: list[int]
