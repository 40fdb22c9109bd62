"""Findings of ``fastdecode doctor``, each with its remedy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One finding. ``level``: "ok", "note" or "broken"; anything but "ok" has a remedy."""

    level: str
    what: str
    cure: str = ""
