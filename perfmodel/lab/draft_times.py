"""Speculative decoding in plans and simulations: what drafts cost, and how often they are accepted."""

from __future__ import annotations

from dataclasses import dataclass

from fastdecode.core.errors import ConfigError
from fastdecode.perfmodel.stages import RPart, SPart

ROW_SHARE = 0.04
"""The part of a cached token's time that each further row over the same reading takes at least: appending, mostly."""

LOOKUP_SECONDS = 15e-6
"""Seconds of looking a sequence's last tokens up among its others, of some thousands."""


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
    """Return the part of a cached token's time that a further row takes; ``group`` query heads share a KV head."""
    # The part that a row of each query head takes to compute: on Zen 4 3.3 ns of a bfloat16 token and KV head of 128,
    # where reading takes 25 (docs/performance.md). A call takes the larger of reading and computing.
    computed_share = 0.132
    # Rows of a verification: the time of computing them above that of reading is spread over all but the first
    usual_rows = 5
    above = (computed_share * group * usual_rows - 1.0) / (usual_rows - 1)
    # A row of its own
    most_row_share = 1.0
    return min(max(ROW_SHARE, above), most_row_share)
