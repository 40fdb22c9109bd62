"""The sequences of a continued session that all ranks' R-workers hold in their caches with the same tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastdecode.core.held import HeldSequence
from fastdecode.core.types import Verb

Parts = Sequence[Mapping[int, HeldSequence]]
"""The sequences that each rank's part of one logical R-worker holds, by cache id."""


def read_held(infos: Sequence[Mapping[str, Any]]) -> list[dict[int, HeldSequence]]:
    """Return, for each rank, the sequences that its R-worker caches, by cache id.

    ``infos``: each rank's ``RWorkerInfo`` as a dictionary. The R-workers together form one logical R-worker.
    """
    return [
        {each["cache_id"]: HeldSequence(each["cache_id"], each["num_tokens"], tuple(each["blocks"])) for each in held}
        for held in (info["held"] for info in infos)
    ]


def common(parts: Parts, block_size: int) -> tuple[HeldSequence, ...]:
    """Return the sequences that all ranks' R-workers cache, each cut to the tokens that all of them hold.

    Two sequences share a block in the result only if they share it on every rank. Ranks may differ, since a step that
    was broken off may have begun on only some of them.
    """
    numbers: dict[tuple[int, ...], int] = {}
    found = []
    for name in sorted(set.intersection(*(set(part) for part in parts))):
        num_tokens = min(part[name].num_tokens for part in parts)
        tables = [part[name].blocks[: -(-num_tokens // block_size)] for part in parts]
        blocks = tuple(numbers.setdefault(each, len(numbers)) for each in zip(*tables, strict=True))
        found.append(HeldSequence(name, num_tokens, blocks))
    return tuple(found)


def levelling(part: Mapping[int, HeldSequence], kept: Sequence[HeldSequence]) -> tuple[tuple[int, int, int, int], ...]:
    """Return the CONTROL records after which an R-worker that holds ``part`` holds exactly ``kept``.

    The records free and truncate sequences.
    """
    lengths = {each.cache_id: each.num_tokens for each in kept if each.num_tokens}
    gone = [(int(Verb.RELEASE), name, 0, 0) for name in part if name not in lengths]
    longer = [name for name, length in lengths.items() if part[name].num_tokens > length]
    return (*gone, *((int(Verb.TRUNCATE), name, 0, lengths[name]) for name in longer))
