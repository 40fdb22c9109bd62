"""Speculative decoding in plans and simulations: what drafts cost, and how many R-workers fewer suffice with them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fastdecode.core.errors import ConfigError
from fastdecode.perfmodel.equations import largest, tokens_per_verification
from fastdecode.perfmodel.load import Load
from fastdecode.perfmodel.plan import Plan
from fastdecode.perfmodel.planner import Planner
from fastdecode.perfmodel.stages import RPart, SPart

ROW_SHARE = 0.04
"""Of the time of a cached token, what each further row over the same reading takes at least: appending, mostly."""

COMPUTED_SHARE = 0.132
"""Of the same, what a row of each query head takes to compute: on Zen 4 3.3 ns of a bfloat16 token and KV head of 128,
where reading takes 25 (docs/performance.md). A call takes the larger of reading and computing."""

USUAL_ROWS = 5
"""Of a verification: what computing them takes above reading is spread over all but the first."""

MOST_ROW_SHARE = 1.0
"""A row of its own."""

LOOKUP_SECONDS = 15e-6
"""To look a sequence's last tokens up among its others, of some thousands."""


@dataclass(frozen=True)
class DraftCost:
    """Seconds of drafting: ``sequence_seconds`` for each sequence and step, and of one pass for each token.

    A pass takes ``num_layers`` layers and the head of ``s_part``, and as many calls of ``r_part``; None: none. One that
    attends on R-workers computes the rows of the passes before it again, since those leave nothing there.
    """

    sequence_seconds: float = 0.0
    num_layers: int = 0
    s_part: SPart | None = None
    r_part: RPart | None = None

    def seconds(self, num_sequences: int, num_passes: int, kv_tokens: float, num_r_workers: float) -> float:
        """``num_passes`` tokens each of ``num_sequences`` sequences, which have ``kv_tokens`` in all."""
        seconds = self.sequence_seconds * num_sequences
        for number in range(1, num_passes + 1):
            rows = num_sequences * (number if self.r_part else 1)
            if self.s_part:
                seconds += self.num_layers * self.s_part.layer_seconds(rows) + self.s_part.head_seconds(num_sequences)
            if self.r_part:
                seconds += self.num_layers * self.r_part.seconds(kv_tokens / num_r_workers, rows / num_r_workers)
        return seconds


@dataclass(frozen=True)
class Drafting:
    """At most ``num_speculative_tokens`` drafted at ``cost`` for a sequence in a step, each accepted with probability
    ``acceptance_rate`` where those before it were. ``row_share``: see ``ROW_SHARE``."""

    num_speculative_tokens: int
    acceptance_rate: float
    cost: DraftCost
    row_share: float = ROW_SHARE

    def __post_init__(self) -> None:
        if not 0.0 <= self.acceptance_rate <= 1.0:
            raise ConfigError(f"acceptance_rate must be from 0 to 1, not {self.acceptance_rate:g}")


def row_share(group: int) -> float:
    """Of a model whose keys and values ``group`` query heads share."""
    above = (COMPUTED_SHARE * group * USUAL_ROWS - 1.0) / (USUAL_ROWS - 1)
    return min(max(ROW_SHARE, above), MOST_ROW_SHARE)


@dataclass(frozen=True)
class SpeculationPlan:
    """With ``num_draft_tokens`` for each sequence and step, ``tokens_per_verification`` come of each.

    ``num_r_workers`` give at least the tokens per second of the plan without drafts, ``saved_r_workers`` fewer than its
    own, and then ``output_tokens_per_second``. ``gain``: tokens per second of the plan's own R-workers with drafts,
    ``gain_draft_tokens`` for each, over those without.
    """

    acceptance_rate: float
    num_draft_tokens: int
    tokens_per_verification: float
    num_r_workers: int
    saved_r_workers: int
    r_workers_set_by: str
    step_seconds: float
    output_tokens_per_second: float
    gain: float
    gain_draft_tokens: int


def plan_speculation(planner: Planner, plan: Plan, drafting: Drafting) -> SpeculationPlan:
    """The fewest R-workers that suffice, with the number of drafts that makes them so few; the fewest drafts of equals.

    A verification reads each cache once for all its rows. So the R-part of a token falls nearly by the tokens that come
    of each, while the S-part has 1 + k rows in place of one.
    """
    in_flight, wanted = plan.in_flight, plan.output_tokens_per_second
    least = planner.memory_r_workers(in_flight)

    def rate(count: int, drafts: int) -> float:
        return _rate(planner, in_flight, drafting, drafts, count)

    def sufficing(drafts: int) -> int:
        """R-workers, no more than the plan's own."""
        return 1 + largest(lambda count: rate(count, drafts) < wanted * (1 - 1e-9), plan.num_r_workers - 1)

    def needed(drafts: int) -> int:
        return max(sufficing(drafts), least)

    choices = range(drafting.num_speculative_tokens + 1)
    drafts = min(choices, key=lambda each: (needed(each), -rate(needed(each), each), each))
    most = max(choices, key=lambda each: (rate(plan.num_r_workers, each), -each))
    count = needed(drafts)
    tokens = tokens_per_verification(drafts, drafting.acceptance_rate)
    return SpeculationPlan(
        acceptance_rate=drafting.acceptance_rate,
        num_draft_tokens=drafts,
        tokens_per_verification=tokens,
        num_r_workers=count,
        saved_r_workers=plan.num_r_workers - count,
        r_workers_set_by="memory" if least > sufficing(drafts) else "bandwidth",
        step_seconds=in_flight * tokens / rate(count, drafts),
        output_tokens_per_second=rate(count, drafts),
        gain=rate(plan.num_r_workers, most) / rate(plan.num_r_workers, 0),
        gain_draft_tokens=most,
    )


def _rate(planner: Planner, in_flight: int, drafting: Drafting, drafts: int, num_r_workers: int) -> float:
    """Output tokens per second."""
    tokens = tokens_per_verification(drafts, drafting.acceptance_rate)
    rows, kv_tokens = planner.mean_step(in_flight, num_r_workers)
    prompt_rows = (rows - in_flight) * tokens  # sequences end, and others begin, as much sooner
    sampled = in_flight * (1 + drafts)
    attended = kv_tokens * (1 + drafting.row_share * drafts)
    rows = prompt_rows + sampled
    load = Load(rows, sampled, attended, copied_rows=planner.copied_rows(rows, num_r_workers))
    seconds = planner.step_model(num_r_workers).seconds(load)
    if drafts:
        seconds += drafting.cost.seconds(in_flight, drafts, kv_tokens, num_r_workers)
    return in_flight * tokens / seconds if math.isfinite(seconds) else 0.0
