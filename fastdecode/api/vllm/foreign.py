"""Describes vLLM settings that FastDecode lacks: accepted without effect, or refused with advice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Foreign:
    """One vLLM setting that FastDecode lacks; it is also a flag of ``vllm serve``.

    ``values``: how many words follow the flag: "none" (a switch), "one", "many", or "maybe" one. ``neutral``: values
    that mean the same as leaving the setting out. ``shorts``: other flags of the same setting.
    """

    name: str
    refused: bool
    text: str
    """Why the setting has no effect, or what to do instead of using a refused one."""
    values: str = "one"
    neutral: tuple[Any, ...] = ()
    shorts: tuple[str, ...] = ()

    def asks_for_nothing(self, value: Any) -> bool:
        """Return whether ``value`` means the same as leaving the setting out."""
        off = value is False and True not in self.neutral
        return value is None or off or value in ("", [], {}) or value in self.neutral or _number(value) in self.neutral


def without_effect(rows: Mapping[str, str]) -> dict[str, Foreign]:
    """Return settings without effect, by name. ``rows``: by reason, the settings in the notation of ``_read``."""
    return {each.name: each for why, names in rows.items() for each in _read(names, False, why)}


def refused(rows: Iterable[tuple[Any, ...]]) -> dict[str, Foreign]:
    """Return refused settings, by name.

    A row has settings in the notation of ``_read``, advice on what to use instead, and neutral values (``Foreign``).
    """
    return {each.name: each for names, cure, *neutral in rows for each in _read(names, True, cure, tuple(neutral))}


def _read(names: str, is_refused: bool, text: str, neutral: tuple[Any, ...] = ()) -> list[Foreign]:
    """Return the settings in ``names``, a text of names and flags separated by spaces.

    A mark after a name says how many words follow its flag: "?" none, "*" many, "~" at most one, no mark exactly one.
    "+" marks a switch that is on by default. Words that begin with "-" are more flags of the name before them.
    """
    found: list[Foreign] = []
    marks = {"?": "none", "*": "many", "~": "maybe"}
    for word in names.split():
        if word.startswith("-"):
            last = found.pop()
            found.append(Foreign(**{**vars(last), "shorts": (*last.shorts, word)}))
            continue
        name, on = word.removesuffix("+"), word.endswith("+")
        values = marks.get(name[-1], "one")
        found.append(Foreign(name.rstrip("?*~"), is_refused, text, values, (True,) if on else neutral))
    return found


def _number(value: Any) -> Any:
    """Return the number that ``value``, a flag's text, stands for; ``value`` itself if it is no number."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
