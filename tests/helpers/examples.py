"""How much of what is drawn at random a run of the tests looks at."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest

SEES_ALL = bool(os.environ.get("FASTDECODE_TEST_ALL"))
"""``make test-all``; ``make test`` looks at a part."""


def examples(count: int) -> int:
    """``count`` examples of a property, or an eighth of them, yet five."""
    return count if SEES_ALL else max(5, count // 8)


def thinned(values: Sequence[Any], every: int, first: int = 0) -> list[Any]:
    """Parameters of which ``make test`` has each ``every``-th, from number ``first`` on, and ``make test-all`` all."""
    marks = [pytest.mark.thorough]
    return [pytest.param(value, marks=marks * ((i - first) % every > 0)) for i, value in enumerate(values)]
