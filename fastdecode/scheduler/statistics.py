"""What a scheduler has counted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SchedulerStatistics:
    """Requests whose prefix was looked up, prompt tokens that were found, and preemptions."""

    prefix_queries: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0

    def since(self, before: SchedulerStatistics) -> SchedulerStatistics:
        """What was counted after ``before``."""
        return SchedulerStatistics(
            self.prefix_queries - before.prefix_queries,
            self.prefix_hit_tokens - before.prefix_hit_tokens,
            self.preemptions - before.preemptions,
        )
