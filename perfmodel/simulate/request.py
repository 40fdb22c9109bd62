"""A request in the simulator: what it asks for, and when it got it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(eq=False)
class SimulatedRequest:
    """A prompt, exactly ``output_len`` tokens to generate, and the moments of its life in simulated seconds.

    ``max_tokens``: what the scheduler is told, for outputs that stop by themselves; None: the length itself.
    ``prompt_token_ids`` is never changed, so runs may share it; which tokens they are matters to prefix caching alone.
    ``start_seconds``: the start of the first step that computed any of it. ``token_seconds``: the end of each step
    that gave it a token, float64 [tokens so far], there once the run has ended.
    """

    prompt_token_ids: list[int]
    output_len: int
    arrival_seconds: float = 0.0
    start_seconds: float | None = None
    token_seconds: np.ndarray = field(default_factory=lambda: np.zeros(0))
    max_tokens: int | None = None

    @property
    def finished(self) -> bool:
        """True once it has all its tokens."""
        return len(self.token_seconds) == self.output_len

    @property
    def scheduling_delay_seconds(self) -> float:
        """From arrival to the start of its first step; infinite where it never started."""
        return float("inf") if self.start_seconds is None else self.start_seconds - self.arrival_seconds

    @property
    def seconds_between_tokens(self) -> np.ndarray:
        """float64 [tokens − 1]."""
        return np.diff(self.token_seconds)
