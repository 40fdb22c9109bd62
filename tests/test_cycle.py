"""The cycle at its boundaries: what is lost between two decisions spoils neither, and is counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.scheduler_harness import AMPLE, Job, Run

from fastdecode.core.metrics import StepRecord


def decoding(num_workers: int) -> Run:
    """Return a run of nine jobs of 20 + 30 tokens that all decode, with blocks of 4 tokens."""
    limits = replace(
        AMPLE, block_size=4, num_blocks=(200,) * num_workers, bandwidths=(1.0,) * num_workers, max_model_len=64
    )
    run = Run("stall-free", limits, [Job([number] * 20, 30, [30]) for number in range(9)])
    run.arrive_and_abort()
    for _ in range(3):
        run.step()
    return run


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_move_chosen_before_a_loss_came_to_light_is_not_made(lost: int) -> None:
    """While R-worker 0 drains, a lost R-worker comes to light during its first move, which is not made.

    The naive world checks that copied rows exist, and that there is room for them.
    """
    run = decoding(3)
    run.scheduler.members.drain(0)
    run.scheduler.finish(victim := run.alive.pop(max(run.alive)))
    assert victim and run.scheduler.snapshot().has_controls
    run.world.loses = (lost,)
    run.move(100)
    assert run.scheduler.snapshot().present == [worker for worker in (1, 2) if worker != lost]
    run.step_number += 1
    run.to_the_end()
    done = [group[0] for group in run.members if group[0] is not victim]
    assert [len(each.output_token_ids) for each in done] == [30] * 8


def test_a_loss_between_steps_is_counted_with_the_next_step() -> None:
    run, records = decoding(2), list[StepRecord]()
    run.cycle.on_step = records.append
    run.step()
    run.lose(1)
    run.step()
    run.step()
    assert [record.lost_workers for record in records] == [0, 1, 0]


@pytest.mark.parametrize("lost", [(0, 1), (1, 2), (2, 0)])
def test_losses_in_steps_that_only_wait_for_prefill_workers_are_counted_once(lost: tuple[int, int]) -> None:
    """Losses in two steps without rows are counted once, in the next step's record.

    Steps that only wait for prefill workers have no record.
    """
    limits = replace(AMPLE, num_blocks=(200,) * 3, bandwidths=(1.0,) * 3)
    run, records = Run("stall-free", limits, [Job([1] * 21, 3, [3])], prefills_seed=9), list[StepRecord]()
    run.cycle.on_step = records.append
    run.arrive_and_abort()
    for worker in (None, *lost):
        assert not run.step(loses=worker).num_tokens and len(run.scheduler.remote_prompts)
    assert not records and run.scheduler.snapshot().present == [worker for worker in range(3) if worker not in lost]
    run.step_number += 1
    run.to_the_end()
    assert [record.lost_workers for record in records] == [2] + [0] * (len(records) - 1)
    assert len(run.members[0][0].output_token_ids) == 3
