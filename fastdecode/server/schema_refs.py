"""Rewrites references in JSON schemas as JSON pointers from the root of the document that contains the schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote, unquote, urljoin

from fastdecode.core.errors import RequestError

Schema = Mapping[str, Any]

_MOST_HOPS = 16


def localized(schema: Schema, at: str = "#") -> dict[str, Any]:
    """Return a copy of ``schema`` whose references work after it is inserted at JSON pointer ``at`` of a document.

    References to the schema, its parts, its ``$id`` and its anchors are rewritten. Any other reference stays as it
    is, and the grammar refuses it. Raise RequestError for a schema that is nested too deeply.
    """
    places = _places(schema)

    def moved(node: Any, base: str) -> Any:
        if not isinstance(node, Mapping):
            return node
        base = _base(node, base)
        found = _mapped(node, lambda each, _: moved(each, base))
        target = places.find(node.get("$ref"), base)
        if target is not None:
            found["$ref"] = at + quote(target, safe="/~!$&'()*+,;=:@")
        names_of_places = ("$id", "$anchor", "$schema")
        for name in names_of_places:
            found.pop(name, None)
        return found

    try:
        result: dict[str, Any] = moved(schema, "")
    except RecursionError:
        raise RequestError("tools: a schema is nested too deeply") from None
    return result


def _places(schema: Schema) -> _Places:
    try:
        return _Places(schema)
    except RecursionError:
        raise RequestError("tools: a schema is nested too deeply") from None


class _Places:
    """Maps each name that references may use in a schema (``$id``, anchors) to a JSON pointer."""

    def __init__(self, schema: Schema) -> None:
        self._pointers: dict[str, str] = {"": ""}
        self._collect(schema, "", "")

    def find(self, reference: Any, base: str) -> str | None:
        """Return the JSON pointer, without "#", to which ``reference`` refers; None if that is outside the schema."""
        if not isinstance(reference, str):
            return None
        own = base.partition("#")[0] + reference if reference.startswith("#") else _joined(base, reference)
        address, _, fragment = own.partition("#")
        if fragment and not fragment.startswith("/"):
            return self._pointers.get(f"{address}#{fragment}")
        start = self._pointers.get(address)
        return None if start is None else start + unquote(fragment)

    def _collect(self, node: Any, base: str, pointer: str) -> None:
        if not isinstance(node, Mapping):
            return
        own = _base(node, base)
        address = own.partition("#")[0]
        if own != base:
            self._pointers.setdefault(address, pointer)
        if isinstance(anchor := node.get("$anchor"), str):
            self._pointers.setdefault(f"{address}#{anchor}", pointer)
        _mapped(node, lambda each, path: self._collect(each, own, pointer + path))


def _mapped(node: Schema, change: Callable[[Any, str], Any]) -> dict[str, Any]:
    """Return ``node`` with each direct subschema replaced by ``change(subschema, its path from node)``."""
    found: dict[str, Any] = {}
    # Keywords whose value maps names to schemas
    by_name = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})
    # Keywords whose value holds no schema
    data = frozenset({"enum", "const", "default", "examples", "example"})
    for key, value in node.items():
        path = _step(key)
        if key in data:
            found[key] = value
        elif key in by_name and isinstance(value, Mapping):
            found[key] = {name: change(each, path + _step(name)) for name, each in value.items()}
        elif isinstance(value, list):
            found[key] = [change(each, f"{path}/{number}") for number, each in enumerate(value)]
        else:
            found[key] = change(value, path)
    return found


def _base(node: Schema, base: str) -> str:
    name = node.get("$id")
    return _joined(base, name) if isinstance(name, str) else base


def _joined(base: str, reference: str) -> str:
    try:
        return urljoin(base, reference) if base else reference
    except ValueError as error:
        raise RequestError(f"tools: {reference!r:.80} is no address of a schema: {error}") from None


def _step(name: str) -> str:
    return "/" + name.replace("~", "~0").replace("/", "~1")


def argument_types(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return ``tools`` for answer parsers: schemas have only each argument's types, with references resolved."""
    found = []
    for tool in tools:
        function = tool.get("function")
        schema = function.get("parameters") if isinstance(function, Mapping) else None
        if isinstance(function, Mapping) and isinstance(schema, Mapping):
            whole = localized(schema)
            given = _followed(whole, whole).get("properties")
            named = given.items() if isinstance(given, Mapping) else ()
            types = {name: {"type": _types(each, whole)} for name, each in named}
            found.append({"name": function.get("name"), "parameters": {"properties": types}})
    return found


def _types(schema: Any, whole: Schema, hops: int = 0) -> list[str]:
    """Return the JSON type names that ``schema`` allows, [] if it names none. ``whole``: contains ``schema``."""
    if not _is_map(schema) or hops > _MOST_HOPS:
        return []
    schema = _followed(schema, whole)
    declared = schema.get("type")
    found = [declared] if isinstance(declared, str) else [each for each in _list(declared) if isinstance(each, str)]
    for name in ("anyOf", "oneOf", "allOf"):
        for each in _list(schema.get(name)):
            found += _types(each, whole, hops + 1)
    values = [*_list(schema.get("enum")), *([schema["const"]] if "const" in schema else ())]
    found += [] if found else [_type_of(value) for value in values]
    return list(dict.fromkeys([*found, *(["null"] if schema.get("nullable") else [])]))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _followed(schema: Schema, whole: Schema) -> Schema:
    """Return the schema that ``schema``'s ``$ref`` names in ``whole``; ``schema`` itself without such a reference."""
    for _ in range(_MOST_HOPS):
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            break
        found: Any = whole
        for step in unquote(reference[1:]).split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list):
                found = found[int(name)] if name.isdecimal() and int(name) < len(found) else None
            else:
                found = found.get(name) if _is_map(found) else None
        if not _is_map(found):
            break
        schema = found
    return schema


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "integer", float: "number", list: "array", dict: "object", type(None): "null"}
    return names.get(type(value), "string")


def _is_map(value: Any) -> bool:
    return isinstance(value, Mapping)
