"""Delays between attempts to open R-workers that ask to join, after a failure."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field

FIRST_SECONDS, MOST_SECONDS = 1.0, 30.0
"""First and longest delay after a failed attempt at the same address; it doubles each time."""


MOST_ADDRESSES = 1024


MOST_REASONS = 16
"""Most failure reasons remembered per address."""


@dataclass
class _Failures:
    seconds: float = 0.0
    next_time: float = 0.0
    reasons: set[str] = field(default_factory=set)


class Attempts:
    """Addresses at which an attempt failed; the latest are ``remembered``. Any thread may use it."""

    def __init__(self) -> None:
        self.remembered: OrderedDict[str, _Failures] = OrderedDict()

    def may_try(self, address: str) -> bool:
        """Return False for a while after a failure."""
        failures = self.remembered.get(address)
        return failures is None or time.monotonic() >= failures.next_time

    def failed(self, address: str, reason: str) -> bool:
        """Record a failure; return True if ``reason`` is new for this address, and so worth logging."""
        failures = self.remembered.pop(address, None) or _Failures()
        failures.seconds = min(max(FIRST_SECONDS, 2 * failures.seconds), MOST_SECONDS)
        failures.next_time = time.monotonic() + failures.seconds
        is_new = reason not in failures.reasons and len(failures.reasons) < MOST_REASONS
        if is_new:
            failures.reasons.add(reason)
        self.remembered[address] = failures
        if len(self.remembered) > MOST_ADDRESSES:
            self.remembered.popitem(last=False)
        return is_new

    def succeeded(self, address: str) -> None:
        """Forget the failures at ``address``."""
        self.remembered.pop(address, None)
