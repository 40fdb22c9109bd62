"""How much of what is drawn at random a run of the tests looks at."""

from __future__ import annotations

import os

SEES_ALL = bool(os.environ.get("FASTDECODE_TEST_ALL"))
"""``make test-all``; ``make test`` looks at a part."""


def examples(count: int) -> int:
    """``count`` examples of a property, or a quarter of them."""
    return count if SEES_ALL else max(1, count // 4)
