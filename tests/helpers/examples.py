"""How much of what is drawn at random a run of the tests looks at."""

from __future__ import annotations

import os

SEES_ALL = bool(os.environ.get("FASTDECODE_TEST_ALL"))
"""``make test-all``; ``make test`` looks at a part."""


def examples(count: int) -> int:
    """``count`` examples of a property, or an eighth of them, yet five."""
    return count if SEES_ALL else max(5, count // 8)
