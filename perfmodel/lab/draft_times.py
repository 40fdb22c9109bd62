"""Speculative decoding in plans and simulations: the cost and acceptance of drafts."""

from __future__ import annotations

from dataclasses import dataclass

from fastdecode.core.errors import ConfigError
from fastdecode.perfmodel.stages import RPart, SPart

ROW_SHARE = 0.04
"""Least time of each further row over the same read, as a part of a cached token's time: mostly appending."""

LOOKUP_SECONDS = 15e-6
"""Seconds of looking up a sequence's last tokens among some thousands."""


@dataclass(frozen=True)
class DraftCost:
    """Seconds of drafting: ``sequence_seconds`` per sequence and step, and the draft model's time per draft token.

    For each draft token, the draft model computes ``num_layers`` layers and the output projection (``s_part``), and
    calls attention in each layer (``r_part``; None: no attention). R-workers do not cache draft tokens, so each call
    recomputes the rows of the step's earlier draft tokens.
    """

    sequence_seconds: float = 0.0
    num_layers: int = 0
    s_part: SPart | None = None
    r_part: RPart | None = None

    def seconds(self, num_sequences: int, num_passes: int, kv_tokens: float, num_r_workers: float) -> float:
        """Return the seconds of ``num_passes`` draft tokens per sequence.

        ``kv_tokens``: cached tokens of all ``num_sequences`` together.
        """
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
    """The draft tokens of a sequence in a step: at most ``num_speculative_tokens``, which take the time ``cost``.

    ``acceptance_rate``: probability that a draft token is accepted if its predecessors are. ``row_share``: see the
    function.
    """

    num_speculative_tokens: int
    acceptance_rate: float
    cost: DraftCost
    row_share: float = ROW_SHARE

    def __post_init__(self) -> None:
        if not 0.0 <= self.acceptance_rate <= 1.0:
            raise ConfigError(f"acceptance_rate must be from 0 to 1, not {self.acceptance_rate:g}")


def row_share(group: int) -> float:
    """Return the attention time of one draft token's row, as a fraction of the time of the sequence's ordinary row.
    Rows of one sequence read the same cache together, so each draft token adds little. ``group``: query heads per KV
    head.
    """
    # Seconds of arithmetic per row and query head, divided by those of reading a token: 3.3 ns / 25 ns on Zen 4 for a
    # bfloat16 KV head of 128 (docs/performance.md). A call takes the longer of arithmetic and reading.
    computed_share = 0.132
    # Rows of a typical verification, with 4 draft tokens. Arithmetic beyond the time of reading is charged to these 4.
    usual_rows = 5
    above = (computed_share * group * usual_rows - 1.0) / (usual_rows - 1)
    # The row of a draft token takes at most as long as the ordinary row
    most_row_share = 1.0
    return min(max(ROW_SHARE, above), most_row_share)
