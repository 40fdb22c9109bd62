"""Findings of ``fastdecode doctor``, each with its remedy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One result of a check. ``level``: "ok", "note" or "broken". ``cure``: the remedy; "" if the level is "ok"."""

    level: str
    what: str
    cure: str = ""
