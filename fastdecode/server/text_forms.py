"""Constraints on an answer's text (JSON, schema, regex and so on), as OpenAI's and vLLM's requests specify them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from fastdecode.api.structured_outputs import StructuredOutputsParams
from fastdecode.core.errors import RequestError


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    """A named JSON schema for the answer. ``strict``: objects accept no keys that the schema does not list."""

    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's ``response_format``. The schema is in ``json_schema``, or next to ``type``, as some servers have it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None

    def form(self) -> StructuredOutputsParams | None:
        """Return the constraint; None for a free text. Raise RequestError for a missing, second or needless schema."""
        beside = None if self.schema is None else JsonSchema(self.name, self.schema, strict=self.strict)
        if beside and self.json_schema:
            raise RequestError("response_format: schema and json_schema exclude each other: give one")
        told = self.json_schema or beside
        schema = told.schema if told else None
        if self.type == "text":
            if told:
                raise RequestError("response_format: type text takes no schema: give json_schema")
            return None
        if schema is None:
            if self.type == "json_schema" or told:
                raise RequestError("response_format: json_schema.schema is missing")
            return StructuredOutputsParams(json_object=True)
        strict = bool(told and told.strict) or bool(self.strict)
        return StructuredOutputsParams(json=schema, disable_additional_properties=strict)


def asked_form(structured: Mapping[str, Any] | None, older: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the request's structured outputs: the field ``structured``, or vLLM's ``older`` fields; None if unset."""
    given = {kind: value for kind, value in older.items() if value is not None}
    if given and structured is not None:
        raise RequestError(f"structured_outputs and guided_{next(iter(given))} exclude each other: give one")
    return given or structured


def form_of_text(wanted: ResponseFormat | None, given: Mapping[str, Any] | None) -> StructuredOutputsParams | None:
    """Return the constraint of ``wanted`` (response_format) or ``given`` (structured_outputs); None for a free text."""
    form = wanted.form() if wanted else None
    if form is None:
        return None if given is None else _structured(given)
    if given is not None:
        raise RequestError("response_format and structured_outputs exclude each other: give one")
    return form


def _structured(given: Mapping[str, Any]) -> StructuredOutputsParams:
    known = set(StructuredOutputsParams.__dataclass_fields__)
    unknown = sorted(name for name in set(given) - known if given[name] not in (None, False))
    if unknown:
        raise RequestError(f"structured_outputs: {unknown[0]} is not understood")
    return StructuredOutputsParams(
        **{name: value for name, value in given.items() if name in known and value is not None}
    )
