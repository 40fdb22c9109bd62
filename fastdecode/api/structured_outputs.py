"""StructuredOutputsParams: constraints on a request's output text, with vLLM's names and meanings."""

from __future__ import annotations

import json as json_text
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastdecode.api.json_schemas import EXACT, inexact_number, without_other_keys
from fastdecode.core.errors import ConfigError

KINDS = ("json", "regex", "choice", "grammar", "json_object")

UNFOLLOWED = "structured_outputs cannot be followed"
"""The beginning of ``stop_reason`` if a grammar is refused, or fails at some token."""


@dataclass(frozen=True)
class StructuredOutputsParams:
    """One constraint on the output. Exactly one kind is given; the engine checks its content when the request arrives.

    After construction ``json`` is text and ``choice`` a tuple without duplicates.

    Raises:
        ConfigError: one line that names the field, the value given and what would be right.
    """

    json: str | Mapping[str, Any] | None = None
    """A JSON schema, as an object or as text; the output is a JSON value that it allows."""
    regex: str | None = None
    """The whole output matches this regular expression."""
    choice: Sequence[str] | None = None
    """The output is one of these strings."""
    grammar: str | None = None
    """A context-free grammar in Lark's notation or in GBNF (``root ::= …``)."""
    json_object: bool | None = None
    """The output is any JSON object."""
    disable_any_whitespace: bool = False
    """JSON without spaces and newlines between its tokens."""
    disable_additional_properties: bool = False
    """Objects that list their properties accept no others, unless the schema allows others."""

    def __post_init__(self) -> None:
        if self.json_object is False:
            self._set("json_object", None)
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(
                f"structured_outputs must have exactly one of {', '.join(KINDS)}, got {', '.join(given) or 'none'}"
            )
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise _refusal(name, getattr(self, name), "True or False")
        getattr(self, f"_check_{given[0]}")()

    @property
    def schema(self) -> str | None:
        """The JSON schema that the output must follow; None if another kind was given."""
        return '{"type": "object"}' if self.json_object else None if self.json is None else str(self.json)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # a plain assignment fails, since the dataclass is frozen

    def _check_json(self) -> None:
        wanted = "a JSON schema: an object, or its text"
        try:
            read = json_text.loads(self.json) if isinstance(self.json, str) else self.json
            if not isinstance(read, Mapping):
                raise _refusal("json", self.json, wanted)
            number = inexact_number(read)
            closed = without_other_keys(read) if self.disable_additional_properties else dict(read)
            self._set("json", json_text.dumps(closed, allow_nan=False))
        except (ValueError, TypeError, RecursionError):
            raise _refusal("json", self.json, wanted) from None
        if number is not None:
            raise ConfigError(
                f"structured_outputs: json has the number {number!r:.40}; those beyond {EXACT} cannot be followed "
                "exactly: give smaller ones, or a regex"
            )

    def _check_regex(self) -> None:
        self._check_text("regex", "a regular expression")

    def _check_grammar(self) -> None:
        self._check_text("grammar", "a grammar in Lark's notation or in GBNF")
        long_number = re.compile(r"[0-9]{16}|[0-9.][eE]\+?[0-9]{2}")
        if "%json" in str(self.grammar) and long_number.search(str(self.grammar)):
            raise ConfigError(f"structured_outputs: grammar: numbers in %json may be up to {EXACT}")

    def _check_choice(self) -> None:
        listed = isinstance(self.choice, list | tuple) and self.choice
        if not listed or not all(isinstance(each, str) and each and _is_unicode(each) for each in self.choice or ()):
            raise _refusal("choice", self.choice, "a list of non-empty strings")
        self._set("choice", tuple(dict.fromkeys(self.choice or ())))

    def _check_json_object(self) -> None:
        if self.json_object is not True:
            raise _refusal("json_object", self.json_object, "True or None")

    def _check_text(self, name: str, wanted: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, str) or not value.strip() or not _is_unicode(value):
            raise _refusal(name, value, wanted)


def _is_unicode(text: str) -> bool:
    return text.isascii() or not any(0xD800 <= ord(letter) < 0xE000 for letter in text)


def _refusal(name: str, value: object, wanted: str) -> ConfigError:
    return ConfigError(f"structured_outputs: {name} must be {wanted}, got {reprlib.repr(value)}")
