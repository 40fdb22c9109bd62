"""Packing: the place of each token, position and logits row."""

from __future__ import annotations

import pytest
import torch

from fastdecode.core.step import Chunk, MiniBatch
from fastdecode.sworker.run.staging import MIN_ROWS, PackedRows, pack

CPU = torch.device("cpu")


def prompt(sequence_id: int, worker: int, start: int, count: int, last: bool, attends: bool = False) -> Chunk:
    tokens = [100 * sequence_id + start + i for i in range(count)]
    return Chunk(sequence_id, worker, start, tokens, attends, samples=last, last_of_prompt=last, is_decode=False)


def rows(packed: PackedRows) -> tuple[list[int], list[int]]:
    """Return tokens and positions, after checking their form."""
    for ids in (packed.input_ids, packed.position_ids):
        assert ids.dtype == torch.int64 and ids.ndim == 2 and ids.shape[0] == 1
    return packed.input_ids[0].tolist(), packed.position_ids[0].tolist()


def test_chunks_lie_one_after_the_other() -> None:
    chunks = [
        Chunk(1, 0, 30, (7,)),
        prompt(2, 0, 4, 3, last=True),
        Chunk(3, 1, 9, (8,)),
        prompt(4, 1, 0, 15, last=False),
    ]
    packed = pack(MiniBatch.of(chunks), CPU)
    tokens, positions = rows(packed)
    assert tokens == [7, 204, 205, 206, 8, *range(400, 415)]
    assert positions == [30, 4, 5, 6, 9, *range(15)]
    assert (packed.num_rows, packed.num_sampled) == (20, 3)
    assert packed.logits_rows.tolist() == [0, 3, 4] + [4] * 13
    assert [(p.sequence_id, p.rows, p.context_len, p.last_of_prompt) for p in packed.prompt_rows] == [
        (2, slice(1, 4), 4, True),
        (4, slice(5, 20), 0, False),
    ]


@pytest.mark.parametrize("count", [1, 15, 16, 17, 40])
def test_small_forwards_are_padded_at_the_end(count: int) -> None:
    packed = pack(MiniBatch.of(Chunk(i, 0, 5 + i, (50 + i,)) for i in range(count)), CPU)
    tokens, positions = rows(packed)
    padding = [0] * (MIN_ROWS - count)
    assert tokens == [*range(50, 50 + count), *padding]
    assert positions == [*range(5, 5 + count), *padding]
    assert (packed.num_rows, packed.num_sampled) == (count, count)
    assert packed.logits_rows is None


def test_nothing_sampled_asks_for_no_logits() -> None:
    packed = pack(MiniBatch.of([prompt(1, 0, 0, 20, last=False)]), CPU)
    assert packed.num_sampled == 0
    assert packed.logits_rows.tolist() == [] and packed.logits_rows.dtype == torch.int64


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ([Chunk(1, 0, 9, (1,)), prompt(2, 0, 0, 3, True, attends=True)], slice(0, 4)),
        ([Chunk(1, 0, 9, (1,)), prompt(2, 0, 0, 3, True)], slice(0, 1)),
        ([Chunk(1, 0, 9, (1,)), Chunk(3, 1, 9, (1,)), prompt(2, 1, 0, 3, True)], slice(0, 2)),
        ([prompt(2, 0, 0, 3, True), prompt(4, 1, 0, 2, True)], slice(0, 0)),
        ([prompt(2, 0, 0, 3, True), Chunk(3, 1, 9, (1,))], [3]),
        ([Chunk(1, 0, 9, (1,)), prompt(2, 0, 0, 2, True), prompt(3, 1, 0, 2, True, attends=True)], [0, 3, 4]),
    ],
)
def test_attending_rows_are_a_slice_where_they_lead(chunks: list[Chunk], expected: slice | list[int]) -> None:
    packed = pack(MiniBatch.of(chunks), CPU)
    found = packed.attending_rows
    if isinstance(expected, slice):
        assert found == expected
    else:
        assert isinstance(found, torch.Tensor) and found.tolist() == expected
    marks = torch.arange(packed.num_rows)
    owners = [chunk for chunk in chunks for _ in chunk.token_ids]
    assert marks[found].tolist() == [row for row, chunk in enumerate(owners) if chunk.attends]
