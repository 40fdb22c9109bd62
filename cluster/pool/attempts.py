"""Attempts to open R-workers that ask to join: after a failure the next one waits."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field

FIRST_SECONDS, MOST_SECONDS = 1.0, 30.0
"""Least time from a failed attempt to the next at the same address: it doubles from the first to the second."""

MOST_ADDRESSES = 1024


@dataclass
class _Failures:
    seconds: float = 0.0
    next_time: float = 0.0
    reasons: set[str] = field(default_factory=set)


class Attempts:
    """Addresses at which an attempt failed; those that failed last are ``remembered``. For any thread."""

    def __init__(self) -> None:
        self.remembered: OrderedDict[str, _Failures] = OrderedDict()

    def may_try(self, address: str) -> bool:
        """False for a while after a failure."""
        failures = self.remembered.get(address)
        return failures is None or time.monotonic() >= failures.next_time

    def failed(self, address: str, reason: str) -> bool:
        """Note a failure; True if ``reason`` is new for this address, and so worth a line in the log."""
        failures = self.remembered.pop(address, None) or _Failures()
        failures.seconds = min(max(FIRST_SECONDS, 2 * failures.seconds), MOST_SECONDS)
        failures.next_time = time.monotonic() + failures.seconds
        # That are remembered of one address
        most_reasons = 16
        is_new = reason not in failures.reasons and len(failures.reasons) < most_reasons
        if is_new:
            failures.reasons.add(reason)
        self.remembered[address] = failures
        if len(self.remembered) > MOST_ADDRESSES:
            self.remembered.popitem(last=False)
        return is_new

    def succeeded(self, address: str) -> None:
        """Forget what failed there."""
        self.remembered.pop(address, None)
