"""Simulated time."""

from __future__ import annotations


class Clock:
    """One clock for a world, its requests and its companions. ``now_seconds`` only grows.

    ``between_seconds``: what host work between two steps took since they were last taken: copies and drafts.
    """

    def __init__(self) -> None:
        self.now_seconds = self.between_seconds = 0.0

    def compute(self, seconds: float) -> None:
        """Let a step of so many seconds pass."""
        self.now_seconds += seconds

    def work(self, seconds: float) -> None:
        """Let so many seconds of work between two steps pass."""
        self.now_seconds += seconds
        self.between_seconds += seconds

    def wait_until(self, moment: float) -> None:
        """Let time pass in which nobody works; a moment that has passed changes nothing."""
        self.now_seconds = max(self.now_seconds, moment)

    def take_between_seconds(self) -> float:
        """Return the seconds between the last step and this one, and count from 0 again."""
        seconds, self.between_seconds = self.between_seconds, 0.0
        return seconds
