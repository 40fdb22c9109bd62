"""What all ranks' parts of an R-worker have of a session that goes on: of every part the same tokens, or nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastdecode.core.held import HeldSequence
from fastdecode.core.types import Verb

Parts = Sequence[Mapping[int, HeldSequence]]
"""By rank what its part holds, by name."""


def read_held(infos: Sequence[Mapping[str, Any]]) -> list[dict[int, HeldSequence]]:
    """``Parts`` of what the ranks say of one R-worker, each as ``asdict`` has its ``RWorkerInfo``."""
    return [
        {each["cache_id"]: HeldSequence(each["cache_id"], each["num_tokens"], tuple(each["blocks"])) for each in held}
        for held in (info["held"] for info in infos)
    ]


def common(parts: Parts, block_size: int) -> tuple[HeldSequence, ...]:
    """Return sequences that every part has, each as long as all have it.

    Two share a block where they do so in every part: a step that one part had begun and another had not may have parted
    them in one.
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
    """CONTROL records after which ``part`` has what is ``kept``, and no more."""
    lengths = {each.cache_id: each.num_tokens for each in kept if each.num_tokens}
    gone = [(int(Verb.RELEASE), name, 0, 0) for name in part if name not in lengths]
    longer = [name for name, length in lengths.items() if part[name].num_tokens > length]
    return (*gone, *((int(Verb.TRUNCATE), name, 0, lengths[name]) for name in longer))
