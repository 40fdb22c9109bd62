"""What S-worker and R-workers of one machine take from each other: its memory bandwidth, caches and power."""

from __future__ import annotations

from dataclasses import dataclass

from fastdecode.errors import ConfigError


@dataclass(frozen=True)
class Contention:
    """How many times longer each side takes while the other works too; 1 where they share nothing.

    Two sides that share every core in turn have 2 and 2: then :meth:`together` is the sum.
    """

    s_slowdown: float = 1.0
    r_slowdown: float = 1.0

    def __post_init__(self) -> None:
        if self.s_slowdown < 1 or self.r_slowdown < 1:
            raise ConfigError(
                f"a neighbour makes nobody faster: slowdowns must be at least 1, not {self.s_slowdown:g} and "
                f"{self.r_slowdown:g}"
            )

    def together(self, s_seconds: float, r_seconds: float) -> float:
        """Seconds until both are done, started at once, that alone would take ``s_seconds`` and ``r_seconds``.

        Both are slow until the first is done; what is left of the other then goes on alone.
        """
        s_slow, r_slow = s_seconds * self.s_slowdown, r_seconds * self.r_slowdown
        if s_slow <= r_slow:
            return s_slow + r_seconds - s_slow / self.r_slowdown
        return r_slow + s_seconds - r_slow / self.s_slowdown
