"""What must hold of any engine that has nothing to do."""

from __future__ import annotations

from fastdecode.engine import LLMEngine


def assert_nothing_held(engine: LLMEngine) -> None:
    """The R-workers hold the blocks that the scheduler counts, all of them retained prefixes, and give them up."""
    ledger = engine.scheduler.ledger
    assert engine.backend.blocks_used == sum(ledger.num_blocks) - sum(ledger.free) == sum(ledger.cached)
    engine.reset_prefix_cache()
    assert engine.backend.blocks_used == 0
    assert ledger.free == ledger.num_blocks
    assert engine._s_worker.scratch.num_sequences == 0
