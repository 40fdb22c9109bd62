"""Attempts to open R-workers that ask to join: after a failure the next one waits."""

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
        # Least time from a failed attempt to the next at the same address: it doubles from the first to the second
        first_seconds, most_seconds = 1.0, 30.0
        failures.seconds = min(max(first_seconds, 2 * failures.seconds), most_seconds)
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
