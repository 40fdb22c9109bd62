"""Whether sequences need ranges on several R-workers, for ``fastdecode plan``, and which: as the engine chooses."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace

from fastdecode.api.config import EngineConfig
from fastdecode.core.errors import PlanError
from fastdecode.perfmodel.plan import Plan
from fastdecode.perfmodel.planner import Planner
from fastdecode.scheduler.policy.range_sizes import choose_range_tokens

BLOCK_SIZE = EngineConfig().block_size


@dataclass(frozen=True)
class RangePlan:
    """``kv_shard_tokens``: of a range, None where sequences lie on one R-worker each. ``reason``: "time", "memory",
    "asked for", or "" where there is none. ``s_times``: how many times S time one R-worker would read a sequence of
    mean length for; ``r_worker_tokens``: what one holds, None where nothing says."""

    kv_shard_tokens: int | None
    reason: str
    s_times: float
    r_worker_tokens: int | None


def plan_ranges(args: argparse.Namespace, planner: Planner, plan: Plan) -> RangePlan:
    """For the plan's R-workers and batch; PlanError where not even ranges hold a sequence."""
    longest, count, capacity = math.ceil(planner.workload.seq_len), plan.num_r_workers, planner.capacity_tokens
    blocks = 1 << 40 if math.isinf(capacity) else int(capacity) // BLOCK_SIZE
    balanced = planner.step_model(count).balanced_kv_tokens_each(plan.in_flight)
    needed = blocks * BLOCK_SIZE < longest
    chosen = args.kv_shard_tokens or choose_range_tokens(longest, (blocks,) * count, BLOCK_SIZE, balanced)
    if planner.kv_replicas > 1:
        chosen = None
        if needed:
            raise PlanError(
                f"one R-worker holds {blocks * BLOCK_SIZE} cached tokens, and a copy is of a whole sequence, of "
                f"{longest}: give more --kv-cache-memory, or leave --kv-replicas out"
            )
    if needed and chosen is None:
        raise PlanError(
            f"{count} R-worker(s) hold {count * blocks * BLOCK_SIZE} cached tokens, and no ranges of one sequence of "
            f"{longest} fit: give more --kv-cache-memory"
        )
    chosen = chosen if chosen is not None and chosen < longest else None
    reason = "" if chosen is None else "asked for" if args.kv_shard_tokens else "memory" if needed else "time"
    held = None if math.isinf(capacity) else blocks * BLOCK_SIZE
    return RangePlan(chosen, reason, longest / max(balanced, 1), held)


def with_ranges(planner: Planner, ranges: RangePlan) -> Planner:
    """``planner`` with what the ranges cost."""
    return replace(planner, range_tokens=ranges.kv_shard_tokens) if ranges.kv_shard_tokens else planner


def range_text(planner: Planner, ranges: RangePlan) -> str:
    """Of sequences that need them, and why."""
    longest = f"a sequence of {planner.workload.seq_len:g}"
    why = {
        "time": f"{longest} takes one R-worker {ranges.s_times:.1f} times S time",
        "memory": f"{longest} does not fit one R-worker's {ranges.r_worker_tokens} tokens",
        "asked for": f"{longest} would take one R-worker {ranges.s_times:.1f} times S time",
    }
    return f"of {ranges.kv_shard_tokens} tokens (--kv-shard-tokens): {why[ranges.reason]}"
