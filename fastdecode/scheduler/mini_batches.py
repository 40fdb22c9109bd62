"""Dealing a step's chunks to the mini-batches so that each has about the same rows and the same KV load."""

from __future__ import annotations

from collections.abc import Iterable

from fastdecode.types import Chunk


def deal(chunks: Iterable[Chunk], num_mini_batches: int) -> tuple[tuple[Chunk, ...], ...]:
    """Split ``chunks`` into mini-batches, each sorted by worker with its attending chunks first.

    Single rows are dealt longest context first in snake order (0 1 1 0 0 1 …), worker by worker: counts differ by
    one at most and loads stay close. Longer chunks then go to whichever mini-batch has the fewest rows.
    """
    dealt: list[list[Chunk]] = [[] for _ in range(num_mini_batches)]
    ordered = sorted(chunks, key=lambda chunk: (chunk.worker, -chunk.context_len))
    singles = [chunk for chunk in ordered if len(chunk.token_ids) == 1]
    order = [*range(num_mini_batches), *reversed(range(num_mini_batches))]
    for turn, chunk in enumerate(singles):
        dealt[order[turn % len(order)]].append(chunk)
    rows = [len(chunks) for chunks in dealt]
    for chunk in sorted(ordered, key=lambda chunk: -len(chunk.token_ids))[: len(ordered) - len(singles)]:
        smallest = rows.index(min(rows))
        dealt[smallest].append(chunk)
        rows[smallest] += len(chunk.token_ids)
    return tuple(tuple(sorted(chunks, key=lambda chunk: (chunk.worker, not chunk.attends))) for chunks in dealt)
