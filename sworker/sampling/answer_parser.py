"""Cuts an answer's text into content, reasoning and tool calls with transformers' streaming response parser."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastdecode.core.errors import ConfigError

try:
    from transformers.utils.chat_parsing import ResponseParser, parse_response
    from transformers.utils.chat_parsing.response_templates import ResponseTemplateField, load_response_template
except ImportError:  # an older transformers
    ResponseParser = None

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Fields of a response template that hold reasoning."""

CALLS = "tool_calls"
"""The beginning of field names that hold tool calls. A template may have several forms."""

CONTENT = "content"
WRAPPER = "wrapper"
"""The field of text around tool calls, which is shown if no call follows."""


def has_parser() -> bool:
    """Return whether the installed transformers has the response parser, with all features that this module uses."""
    if ResponseParser is None:
        return False
    fields = ResponseTemplateField.__dataclass_fields__
    return {"join", "open_literals"} <= fields.keys() and "tools" in inspect.signature(parse_response).parameters


@dataclass(frozen=True)
class Piece:
    """A part of an answer: text that belongs to a field, or a whole region (tool calls, delimiters) with its ``body``.

    ``closes``: the region ends with this piece. ``closed``: the region's closing delimiter was found. ``end``: the
    offset in the answer at which the piece ends.
    """

    field: str
    text: str
    body: str = ""
    closes: bool = False
    closed: bool = False
    end: int = 0


class AnswerTemplate:
    """A response template of transformers (docs: "Response parsing"), split into two templates.

    The first only cuts a growing text into regions, which never fails. The second parses the tool calls of a region,
    and may fail.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        """``spec``: a response template. Raise ConfigError, with the reason, if it is malformed."""
        self.spec = dict(spec)
        try:
            self._reading = load_response_template(self.spec)
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"response_template: {error}") from None
        self.regions = _regions(self._reading)

    @property
    def markers(self) -> str:
        """The delimiters of all fields in one text. If a special token occurs in it, answers must keep that token."""
        return str(self.spec["fields"]).replace("\\", "")

    @property
    def is_plain(self) -> bool:
        """True if the template has no reasoning and no tool calls, so that all text is content."""
        return set(self.regions.fields) == {CONTENT}

    def begun_by(self, prompt: str) -> str:
        """Return the end of ``prompt`` that belongs to the answer, such as an opened region of reasoning."""
        return str(self.regions.truncate_past_last_anchor(prompt)) if self.has_begun(prompt) else ""

    def has_begun(self, prompt: str) -> bool:
        """Return whether ``prompt`` contains the text that the template expects before an answer."""
        return self.regions.start_anchor_re.search(prompt) is not None

    def without_calls(self) -> AnswerTemplate:
        """Return a template that does not parse tool calls: their text becomes content."""
        fields = {
            name: field
            for name, field in self.spec["fields"].items()
            if not name.startswith(CALLS) and not name.startswith(WRAPPER)
        }
        return AnswerTemplate({**self.spec, "fields": fields}) if fields else self

    def is_field_of_calls(self, name: str) -> bool:
        return name.startswith(CALLS)

    def read_calls(self, region: Piece, tools: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Return a region's tool calls: ``{"function": {"name", "arguments"}}``, or texts that are still to be parsed.

        ``tools``: their schemas give the types of arguments that the model writes as text. Raise ValueError if the
        region does not have the form of the template.
        """
        field = self._reading.fields[region.field]
        # Kinds of content whose values are plain text, so that types must come from the tools' schemas
        of_texts = ("xml-inline", "kv-lines")
        types = list(tools) if field.content in of_texts else None
        if field.content == "xml-inline":
            rest = re.sub(field.content_args["tag_pattern"], "", region.body, flags=re.DOTALL)
            if rest.strip() or not region.closed:
                raise ValueError("the call is not complete")
        try:
            message = parse_response(region.text, self._reading, prefix="", tools=types)
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(str(error)) from None
        found = message.get(region.field, [])
        return found if isinstance(found, list) else [found]


def _blank(name: str) -> Any:
    return load_response_template({"start_anchor": "-", "fields": {name: {}}}).fields[name]


def _regions(template: Any) -> Any:
    """Return ``template`` with fields that keep raw text, so that parsing with it cannot fail."""
    fields = {}
    for name, field in template.fields.items():
        as_text = {"content": "text", "content_args": {"strip": False}, "transform": None, "transform_each": False}
        plain = dataclasses.replace(field, **as_text, repeats=False, join=None, optional=True)
        if name == template.implicit:
            if field.close_re is not None:
                fields["content_end"] = _mark(plain)
            plain = dataclasses.replace(plain, close_re=None, close_literals=None, close_literal_can_extend=False)
        fields[name] = plain
    implicit = template.implicit
    if implicit is None:  # without such a field, the parser would drop text outside fields
        implicit = "marks_between"
        fields[implicit] = dataclasses.replace(_blank(implicit), content_args={"strip": False})
    return dataclasses.replace(template, defaults={}, fields=fields, implicit=implicit)


def _mark(field: Any) -> Any:
    """Return a template field that matches only the closing delimiter of ``field``."""
    empty = load_response_template({"start_anchor": "-", "fields": {"end": {"open": "-", "close_pattern": ""}}})
    closing = ("close_re", "close_literals", "close_literal_can_extend")
    opening = {name.replace("close", "open"): getattr(field, name) for name in closing}
    return dataclasses.replace(empty.fields["end"], name="content_end", **opening)


class AnswerCutter:
    """Cuts one answer into pieces as it grows. The cuts do not depend on the chunks in which the text arrives."""

    def __init__(self, template: AnswerTemplate, prompt: str) -> None:
        """``prompt``: the text before the answer, which may end inside a region that the answer continues."""
        self._fields = template.regions.fields
        begun = template.begun_by(prompt)
        opened = ResponseParser(template.regions, prefix=prompt) if begun else None
        events = opened.initial_events if opened else []
        told = [event for event in events if event["field"] != CONTENT or event.get("text", "").strip()]
        self.follows_thought = bool(told) and told[-1]["type"] == "region_close" and told[-1]["field"] in THOUGHTS
        if not events or events[-1]["type"] == "region_close" or events[-1]["field"] == template.regions.implicit:
            begun, opened = "", None  # the prompt ends outside any region, so the parser starts anew
        self._parser = opened or ResponseParser(template.regions, prefix="")
        self._text, self._start = begun, len(begun)
        self._at, self._body, self._region = 0, 0, 0
        if opened:
            self._follow(opened.initial_events)

    @property
    def is_open(self) -> bool:
        """True if the prompt ends inside a region, such as reasoning, that the answer continues."""
        return self._start > 0

    def feed(self, text: str) -> list[Piece]:
        """Append ``text`` to the answer; return the pieces that are complete now."""
        self._text += text
        return self._follow(self._parser.feed(text))

    def finish(self) -> list[Piece]:
        """Return the pieces of the remaining text. ``feed`` may not be called afterwards."""
        return self._follow(self._parser.finalize()[1])

    def _follow(self, events: Sequence[Mapping[str, Any]]) -> list[Piece]:
        """Return the pieces that the parser's ``events`` describe, with offsets that include the removed delimiters."""
        found = []
        for event in events:
            name = event["field"]
            if event["type"] == "region_open":
                self._region = self._at
                self._skip(self._fields[name].open_re)
                self._body = self._at
            elif event["type"] == "region_chunk":
                self._at += len(event["text"])
                if _is_shown(name):
                    found.append(Piece(name, event["text"], end=self._at - self._start))
            else:
                body = self._text[self._body : self._at]
                closed = self._skip(self._fields[name].close_re)
                text = "" if _is_shown(name) else self._text[self._region : self._at]
                found.append(Piece(name, text, body, True, closed, self._at - self._start))
        return found

    def _skip(self, delimiter: Any) -> bool:
        match = delimiter and delimiter.match(self._text, self._at)
        if match:
            self._at = match.end()
        return bool(match)


def _is_shown(name: str) -> bool:
    """Return whether a field's text is returned while it grows; other fields are returned when complete."""
    return name == CONTENT or name in THOUGHTS
