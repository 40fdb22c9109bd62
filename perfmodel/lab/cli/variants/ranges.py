"""Ranges in a plan: whether sequences are cut over several R-workers, and into which ranges, as in the engine."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from fastdecode.api.config import EngineConfig
from fastdecode.core.errors import ConfigError, PlanError
from fastdecode.core.placing import UNLIMITED
from fastdecode.perfmodel.lab.cli.variants.variant import Line, PlanCase, Variant
from fastdecode.perfmodel.lab.planner import Planner


@dataclass(frozen=True)
class RangePlan:
    """The ranges of a plan.
    ``kv_shard_tokens``: tokens of a range; None if each sequence is on one R-worker. ``reason``: "time", "memory",
    "asked for", or "" without ranges. ``s_times``: time in which one R-worker reads a whole sequence, divided by the
    time of the S-part in a step. ``r_worker_tokens``: cached tokens that fit on one R-worker; None if unknown.
    """

    kv_shard_tokens: int | None
    reason: str
    s_times: float
    r_worker_tokens: int | None


def check_uncut(kv_shard_tokens: int | None) -> None:
    """Raise ConfigError for ranges of a model with recurrent layers."""
    if kv_shard_tokens:
        raise ConfigError(
            "kv_shard_tokens: this model keeps a state per range, which plans and simulations do not count; leave it "
            "out"
        )


class RangeVariant(Variant[RangePlan]):
    """Sequences in ranges on several R-workers (``--kv-shard-tokens``)."""

    name = "ranges"

    def figures(self, case: PlanCase) -> RangePlan:
        """Return the ranges for the plan's R-workers and batch. Raise PlanError if not even ranges hold a sequence."""
        planner, count, capacity = case.planner, case.plan.num_r_workers, case.planner.capacity_tokens
        asked: int | None = case.args.kv_shard_tokens
        config = EngineConfig(kv_shard_tokens=asked, speculative_config=case.args.speculative_config)
        longest, block_size = math.ceil(planner.workload.seq_len), config.block_size
        # KV blocks of an R-worker whose memory is unknown: more than any sequence needs
        unbounded_blocks = 1 << 40
        blocks = unbounded_blocks if math.isinf(capacity) else int(capacity) // block_size
        balanced = planner.step_model(count).balanced_kv_tokens_each(case.plan.in_flight)
        chosen = config.placing.chosen(longest, (blocks,) * count, block_size, balanced).segment_tokens
        needed = blocks * block_size < longest
        if planner.state_bytes_per_sequence:
            check_uncut(asked)
            chosen = longest if not needed else UNLIMITED
        if needed and chosen == UNLIMITED:
            raise PlanError(
                f"{count} R-worker(s) hold {count * blocks * block_size} cached tokens, and no ranges of one sequence "
                f"of {longest} fit: give more --kv-cache-memory"
            )
        reason = "" if chosen >= longest else "asked for" if asked else "memory" if needed else "time"
        held = None if math.isinf(capacity) else blocks * block_size
        return RangePlan(chosen if reason else None, reason, longest / max(balanced, 1), held)

    def planner(self, case: PlanCase, figures: RangePlan) -> Planner:
        """Return the planner with the cost of the ranges."""
        tokens = figures.kv_shard_tokens
        if not tokens:
            return case.planner
        return replace(case.planner, placing=replace(case.planner.placing, segment_tokens=tokens))

    def lines(self, case: PlanCase, figures: RangePlan) -> Iterator[Line]:
        """Yield the length of a range, and the reason for ranges."""
        if not figures.kv_shard_tokens:
            return
        longest = f"a sequence of {case.planner.workload.seq_len:g}"
        why = {
            "time": f"{longest} takes one R-worker {figures.s_times:.1f} times S time",
            "memory": f"{longest} does not fit one R-worker's {figures.r_worker_tokens} tokens",
            "asked for": f"{longest} would take one R-worker {figures.s_times:.1f} times S time",
        }
        yield "ranges", f"of {figures.kv_shard_tokens} tokens (--kv-shard-tokens): {why[figures.reason]}"

    def s_flags(self, case: PlanCase, figures: RangePlan) -> dict[str, object]:
        """Return ``--kv-shard-tokens`` with the plan's value, since the engine's default might be another one."""
        return {"--kv-shard-tokens": figures.kv_shard_tokens} if figures.kv_shard_tokens else {}
