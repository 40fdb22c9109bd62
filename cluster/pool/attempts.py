"""Delays before the pool tries again to connect to an R-worker that asks to join and could not be opened."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field

MOST_ADDRESSES = 1024


@dataclass
class _Failures:
    seconds: float = 0.0
    next_time: float = 0.0
    reasons: set[str] = field(default_factory=set)


class Attempts:
    """Remembers failed attempts to connect, by address: the latest MOST_ADDRESSES. Any thread may use this object."""

    def __init__(self) -> None:
        self.remembered: OrderedDict[str, _Failures] = OrderedDict()

    def may_try(self, address: str) -> bool:
        """Return whether to connect to the R-worker at ``address`` now; False during the delay after a failure."""
        failures = self.remembered.get(address)
        return failures is None or time.monotonic() >= failures.next_time

    def failed(self, address: str, reason: str) -> bool:
        """Record a failure at ``address``; return True if ``reason`` is new for this address, so should be logged."""
        failures = self.remembered.pop(address, None) or _Failures()
        # First and longest delay before the next attempt at an address. The delay doubles with each failure.
        first_seconds, most_seconds = 1.0, 30.0
        failures.seconds = min(max(first_seconds, 2 * failures.seconds), most_seconds)
        failures.next_time = time.monotonic() + failures.seconds
        most_reasons = 16
        is_new = reason not in failures.reasons and len(failures.reasons) < most_reasons
        if is_new:
            failures.reasons.add(reason)
        self.remembered[address] = failures
        if len(self.remembered) > MOST_ADDRESSES:
            self.remembered.popitem(last=False)
        return is_new

    def succeeded(self, address: str) -> None:
        """Forget the failures at ``address``."""
        self.remembered.pop(address, None)
