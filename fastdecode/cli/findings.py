"""Findings of ``fastdecode doctor``, each with its cure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """``level``: "ok", "note" or "broken"; a cure for what is not ok."""

    level: str
    what: str
    cure: str = ""
