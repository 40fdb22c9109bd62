"""Dealing a step's chunks to the mini-batches so that each has about the same rows and the same KV load."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from fastdecode.step import Chunk, MiniBatch


def deal(decodes: MiniBatch, prompts: Iterable[Chunk], num_mini_batches: int) -> tuple[MiniBatch, ...]:
    """Split a step into mini-batches, each sorted by worker with its attending chunks first.

    ``decodes`` come ordered by worker, longest context first, and are dealt in snake order (0 1 1 0 0 1 …): counts
    differ by one at most and loads stay close, whoever came or went. Prompt chunks, longest first, then go to
    whichever mini-batch has the fewest rows.
    """
    snake = np.array([*range(num_mini_batches), *reversed(range(num_mini_batches))])
    turn = snake[np.arange(len(decodes)) % len(snake)]
    places = [np.flatnonzero(turn == i) for i in range(num_mini_batches)]
    dealt = [MiniBatch(decodes.chunks.take(place), decodes.token_ids.take(place)) for place in places]
    rows = [len(part) for part in dealt]
    added: list[list[Chunk]] = [[] for _ in dealt]
    for chunk in sorted(prompts, key=lambda chunk: -len(chunk.token_ids)):
        smallest = rows.index(min(rows))
        added[smallest].append(chunk)
        rows[smallest] += len(chunk.token_ids)
    return tuple(
        MiniBatch.sorted([part, MiniBatch.of(chunks)]) if chunks else part
        for part, chunks in zip(dealt, added, strict=True)
    )
