"""Chooses how many random examples and parameters a test run uses."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest

SEES_ALL = bool(os.environ.get("FASTDECODE_TEST_ALL"))
"""True in ``make test-all``; ``make test`` runs only a part."""


def examples(count: int) -> int:
    """Return ``count`` examples of a property; in ``make test`` an eighth of them, but at least five."""
    return count if SEES_ALL else max(5, count // 8)


def thinned(values: Sequence[Any], every: int, first: int = 0) -> list[Any]:
    """Return every ``every``-th of ``values`` from number ``first`` on; in ``make test-all`` all of them."""
    marks = [pytest.mark.thorough]
    return [pytest.param(value, marks=marks * ((i - first) % every > 0)) for i, value in enumerate(values)]
