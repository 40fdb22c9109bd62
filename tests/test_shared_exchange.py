"""Sums and parts that one machine's ranks exchange through shared memory agree with sums made here."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from fastdecode.sworker.model import shared_exchange
from fastdecode.sworker.model.shared_exchange import FOLDER, SharedExchange, SharedMemory


def ranks_of(pids: list[int]) -> list[SharedExchange]:
    """Return one exchange per process id, all in this process."""
    memory = SharedMemory.make(len(pids))
    assert memory
    try:
        return [SharedExchange(memory.file, index, pids) for index in range(len(pids))]
    finally:
        memory.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_those_in_the_order_of_ranks(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums have the same bits over one slot or many, and again in the same memory, at any place of a row."""
    monkeypatch.setattr(shared_exchange, "SLOT_BYTES", 256)
    ranks = ranks_of([os.getpid()] * 3)
    generator = torch.Generator().manual_seed(0)
    with ThreadPoolExecutor(3) as threads:
        for rows in (1, 2, 7, 40):
            parts = [torch.randn(rows, 24, generator=generator).to(dtype) for _ in ranks]
            expected = ((parts[0].float() + parts[1].float()) + parts[2].float()).to(dtype)
            sums = list(threads.map(lambda rank, part: rank.sum(part.clone()), ranks, parts))
            assert all(torch.equal(each, expected) for each in sums)
            alone = list(threads.map(lambda rank, part: rank.sum(part[-1:].clone()), ranks, parts))
            assert torch.equal(alone[0][0], expected[-1])
            for found in threads.map(lambda rank, part: rank.gather(part), ranks, parts):
                assert all(torch.equal(one, other) for one, other in zip(found, parts, strict=True))
        answers = [b"", b"x" * 1000, b"\0\1"]
        assert list(threads.map(lambda rank, answer: rank.gather_bytes(answer), ranks, answers)) == [answers] * 3
    for rank in ranks:
        rank.close()


def test_a_rank_that_has_ended_is_noticed() -> None:
    """The end is noticed before the parent has asked for its status, and the memory has no name."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        rank, _ = ranks_of([os.getpid(), other.pid])
        other.kill()
        with pytest.raises(RuntimeError, match="a rank of this machine has ended"):
            rank.sum(torch.zeros(4))
    rank.close()
    assert not list(Path(FOLDER).glob("fastdecode-ranks-*"))


def test_memory_that_is_not_there() -> None:
    assert SharedMemory.find("/dev/shm/no such file") is None
