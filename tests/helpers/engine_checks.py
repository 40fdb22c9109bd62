"""Checks that hold for any idle engine."""

from __future__ import annotations

from fastdecode.engine.engine import LLMEngine
from helpers.r_workers import pool_of


def assert_nothing_held(engine: LLMEngine) -> None:
    """Check that R-workers hold exactly the counted blocks, all of retained prefixes, and can free them."""
    workers, pool = engine.scheduler.snapshot().r_workers, pool_of(engine)
    assert pool.blocks_used == sum(worker.num_blocks - worker.free for worker in workers)
    assert pool.blocks_used == sum(worker.retained for worker in workers)
    engine.reset_prefix_cache()
    assert pool.blocks_used == 0
    assert all(worker.free == worker.num_blocks for worker in engine.scheduler.snapshot().r_workers)
    assert engine.world.s_worker.prompts.sequence_ids == ()
