"""How long a step took, as all that learns from it is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from fastdecode.core.step import ScheduledStep

MOST_PROMPT_ROWS = 0.05
"""The most rows of prompts, as a part of the KV tokens attended: more rows of prompts, which R-workers store, would
count as slowness."""


@dataclass(frozen=True)
class Observed:
    """Seconds of one step: the S-worker's own, those it waited for R-workers, and busy ones of each R-worker."""

    step: ScheduledStep
    s_seconds: float
    wait_seconds: float
    r_seconds: Sequence[float]

    @cached_property
    def shows_speeds(self) -> bool:
        """True where the R-workers did little else than attend for decodes."""
        few = self.step.num_prompt_rows <= MOST_PROMPT_ROWS * sum(self.step.kv_loads)
        return self.step.only_decodes_attend and few

    @cached_property
    def decodes(self) -> bool:
        """True where the step had rows, all of them decodes; a step may only sample first tokens of arrived prompts."""
        return self.step.is_decode and self.step.num_tokens > 0


class Observer(Protocol):
    """A part of the scheduler that learns from how long steps take."""

    def observe(self, observed: Observed) -> None:
        """One more step has ended."""
        ...
