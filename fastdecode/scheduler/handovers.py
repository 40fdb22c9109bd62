"""The recurrent states that new segments of sequences begin from.

Each segment of a sequence keeps the state after its last token. So the next segment may lie on any R-worker, and only a
state is copied there, once, before the segment's first rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from fastdecode.core.step import MiniBatch
from fastdecode.core.types import Handover
from fastdecode.scheduler.sequence import TokenSequence
from fastdecode.scheduler.store.store import Store


def handovers(store: Store, mini_batches: Iterable[MiniBatch]) -> tuple[Handover, ...]:
    """Return the states to copy before a step of ``mini_batches``: one for each copy of a segment that begins in it."""
    if store.workers.sizes.rewinds:  # no layer has a state
        return ()
    begun = (sequence for each in mini_batches for sequence in _beginning(store, each))
    return tuple(handover for sequence in begun for handover in _to_tail(sequence))


def _beginning(store: Store, mini_batch: MiniBatch) -> Iterator[TokenSequence]:
    """Yield the sequences of ``mini_batch`` whose rows are the first of a later segment."""
    bases = mini_batch.chunks["base"]
    for place in np.flatnonzero((bases > 0) & (mini_batch.chunks["context_len"] == bases)).tolist():
        sequence_id = int(mini_batch.chunks["sequence_id"][place])
        found = store.residents.decoding.get(sequence_id) or store.residents.prompts[sequence_id]
        yield found


def _to_tail(sequence: TokenSequence) -> Iterator[Handover]:
    """Yield the handovers of the state before the tail of ``sequence`` to each copy of the tail."""
    before, tail = sequence.closed[-1], sequence.tail
    for worker in tail.workers:
        yield Handover(before.home, before.cache_id, before.num_tokens, worker, tail.cache_id, tail.start)
