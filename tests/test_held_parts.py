"""A session's sequences on several ranks' R-workers are cut so that every rank has the same tokens."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest

from fastdecode.core.held import HeldSequence
from fastdecode.core.types import Verb
from fastdecode.tensor_parallel.held import Parts, common, levelling, read_held

BLOCK = 4


def drawn_part(rng: np.random.Generator, shared: int) -> dict[int, HeldSequence]:
    """Return some of ten sequences; those of even names share up to ``shared`` first blocks."""
    found, first = {}, 100
    for name in range(10):
        if rng.random() < 0.8:
            num_tokens = int(rng.integers(0, 20))
            count = -(-num_tokens // BLOCK)
            blocks = [j if name % 2 == 0 and j < shared else first + j for j in range(count)]
            first += count
            found[name] = HeldSequence(name, num_tokens, tuple(blocks))
    return found


def share(part: dict[int, HeldSequence], one: int, other: int, index: int) -> bool:
    return part[one].blocks[index] == part[other].blocks[index]


@pytest.mark.parametrize("seed", range(20))
def test_parts_are_levelled(seed: int) -> None:
    """Nothing that a part lacks is kept, all that every part has is kept, and blocks shared in all stay shared."""
    rng = np.random.default_rng(seed)
    parts = [drawn_part(rng, shared) for shared in rng.integers(0, 4, 3)]
    kept = {each.cache_id: each for each in common(parts, BLOCK)}
    assert set(kept) == {name for name in range(10) if all(name in part for part in parts)}
    for name, each in kept.items():
        assert each.num_tokens == min(part[name].num_tokens for part in parts)
        assert len(each.blocks) == -(-each.num_tokens // BLOCK)
    for one, other in ((a, b) for a in kept for b in kept):
        for index in range(min(len(kept[one].blocks), len(kept[other].blocks))):
            together = all(share(part, one, other, index) for part in parts)
            assert (kept[one].blocks[index] == kept[other].blocks[index]) == together
    for part in parts:
        assert lengths_after(part, levelling(part, list(kept.values()))) == {
            name: each.num_tokens for name, each in kept.items() if each.num_tokens
        }


def lengths_after(part: dict[int, HeldSequence], controls: tuple[tuple[int, int, int, int], ...]) -> dict[int, int]:
    """Return the lengths of a part's sequences after CONTROL records, each for a sequence that is there."""
    lengths = {name: each.num_tokens for name, each in part.items()}
    for verb, name, _, length in controls:
        if verb == Verb.RELEASE:
            del lengths[name]
        else:
            assert verb == Verb.TRUNCATE and 0 < length < lengths[name]
            lengths[name] = length
    return lengths


def test_parts_are_read_as_ranks_say_them() -> None:
    parts: Parts = [{1: HeldSequence(1, 5, (7, 8))}, {}]
    told = [{"held": [asdict(each) for each in part.values()]} for part in parts]
    assert read_held(told) == parts
