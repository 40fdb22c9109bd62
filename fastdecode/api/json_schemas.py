"""Prepares JSON schemas of requests for grammars: finds numbers that grammars round, and closes objects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

EXACT = 2**53
"""The largest integer up to which doubles are exact. Grammars compute bounds as doubles."""

_BY_NAME = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_IN_PLACE = ("allOf", "anyOf", "oneOf", "if", "then", "else")
"""Keywords whose subschemas describe the same JSON value as the schema that contains the keyword."""

_PROSE = ("default", "examples", "title", "description")


def inexact_number(schema: Any) -> float | None:
    """Return a number in ``schema`` that constrains the output and exceeds ``EXACT``; None if there is none."""
    return next((number for number in _numbers(schema) if abs(number) > EXACT), None)


def _numbers(schema: Any) -> Iterator[float]:
    if isinstance(schema, list):
        for each in schema:
            yield from _numbers(each)
    if not isinstance(schema, Mapping):
        return
    bounds = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, Mapping):
            yield from _numbers(list(value.values()))
        elif key in ("const", "enum"):
            yield from _numbers_in(value)
        elif key in bounds and isinstance(value, int | float):
            yield value
        elif key not in _PROSE:
            yield from _numbers(value)


def _numbers_in(value: Any) -> Iterator[float]:
    if isinstance(value, int | float):
        yield value
    for each in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from _numbers_in(each)


def without_other_keys(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``schema`` changed so that objects accept only listed properties, unless ``schema`` allows others.

    An object whose schema lists no properties accepts any, as in xgrammar. Schemas that describe one object together
    are not changed, since each may list only some of the object's properties.
    """
    shared = set(_shared_references(schema))
    found = _closed(schema, True)
    for kind in ("$defs", "definitions"):
        for name, each in found[kind].items() if isinstance(found.get(kind), Mapping) else ():
            if f"#/{kind}/{name}" in shared:
                found[kind][name] = _closed(schema[kind][name], False) if isinstance(each, Mapping) else each
    return found


def _closed(schema: Mapping[str, Any], closes: bool) -> dict[str, Any]:
    """Return ``schema`` with its nested objects closed, and with ``closes`` also the object that it describes itself.

    ``closes`` is False if other schemas describe the same object too.
    """
    found: dict[str, Any] = {}
    alone = closes and not _is_composed(schema)
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, Mapping):
            found[key] = {name: _each_closed(each, True) for name, each in value.items()}
        elif key in ("const", "enum", "not", *_PROSE):
            found[key] = value
        else:
            found[key] = _each_closed(value, alone if key in _IN_PLACE else True)
    if alone and "properties" in schema and not {"additionalProperties", "unevaluatedProperties"} & schema.keys():
        found["additionalProperties"] = False
    return found


def _each_closed(value: Any, closes: bool) -> Any:
    if isinstance(value, list):
        return [_each_closed(each, closes) for each in value]
    return _closed(value, closes) if isinstance(value, Mapping) else value


def _is_composed(schema: Mapping[str, Any]) -> bool:
    """Return whether ``schema`` has keywords by which several schemas describe the same object together."""
    several = isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1
    parts = [key for key in (*_IN_PLACE, "$ref") if key in schema]
    return several or len(parts) > 1 or (bool(parts) and "properties" in schema)


def _shared_references(value: Any, is_shared: bool = False) -> Iterator[str]:
    """Yield the ``$ref`` values of schemas in ``value`` that describe an object together with other schemas."""
    if isinstance(value, list):
        for each in value:
            yield from _shared_references(each, is_shared)
    if not isinstance(value, Mapping):
        return
    composed = is_shared or _is_composed(value)
    if composed and isinstance(value.get("$ref"), str):
        yield value["$ref"]
    for key, each in value.items():
        yield from _shared_references(each, composed and key in _IN_PLACE)
