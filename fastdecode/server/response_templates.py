"""Chooses the response template that parses a model's answers: the tokenizer's, or one in response_templates.json."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastdecode.core.errors import ConfigError
from fastdecode.server.server_settings import OF_TOKENIZER, check_parser_names, entry_of
from fastdecode.sworker.sampling.answer_parser import AnswerTemplate, has_parser

NO_ANCHOR = "\0"
"""Stands for the header of an answer if the chat template writes none."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AnswerSyntax:
    """A model's syntax of answers. ``with_calls``: the syntax if tools are offered. ``without``: calls stay text.

    ``starts_with``: the delimiter that the model omits at the beginning of an answer. ``id_length``: length of tool
    call ids, for chat templates that need a fixed one; 0 for any.
    """

    with_calls: AnswerTemplate
    without: AnswerTemplate
    starts_with: str = ""
    id_length: int = 0

    def for_request(self, offers_tools: bool) -> AnswerSyntax | None:
        """Return this syntax; None if answers can only be content. ``offers_tools``: the request offers tools."""
        return None if self.without.is_plain and not offers_tools else self

    def is_told(self, prompt: str) -> bool:
        """Return whether the end of ``prompt`` shows if the answer begins with reasoning."""
        begun = self.with_calls.begun_by(prompt)
        return any(mark in begun for mark in (self.starts_with, self.starts_with.replace("<", "</")))


def answer_syntax(
    chat_template: str,
    header: str,
    own: Mapping[str, Any] | None,
    tool_call_parser: str | None = None,
    reasoning_parser: str | None = None,
) -> AnswerSyntax | None:
    """Return the syntax of a model with ``chat_template``. If transformers lacks the parser, log that and return None.

    ``header``: text that the chat template writes before an answer. ``own``: the tokenizer's response template,
    preferred to the JSON file's unless a parser is named. Raise ConfigError for an unknown name or an invalid template.
    """
    if not has_parser():
        logger.warning(
            "tool calls and thoughts stay text: this transformers has no response parser; pip install -U transformers"
        )
        return None
    check_parser_names(tool_call_parser, reasoning_parser)
    given = {tool_call_parser, reasoning_parser} - {None, OF_TOKENIZER}
    if own is not None and not given:
        template = AnswerTemplate(own)
        return AnswerSyntax(template, template.without_calls())
    if own is None and OF_TOKENIZER in (tool_call_parser, reasoning_parser):
        raise ConfigError("parser hf needs a tokenizer with a response_template, and this one has none")
    tools = entry_of("tools", tool_call_parser, chat_template)
    thoughts = entry_of("reasoning", reasoning_parser, chat_template)
    anchor = {"start_anchor": _before_thoughts(header, thoughts) or NO_ANCHOR}
    fields = {**thoughts.get("fields", {}), "content": {}}
    with_calls = AnswerTemplate({**anchor, "fields": {**tools.get("fields", {}), **fields}})
    starts_with = thoughts.get("starts_with", "")
    return AnswerSyntax(
        with_calls, AnswerTemplate({**anchor, "fields": fields}), starts_with, tools.get("id_length", 0)
    )


def _before_thoughts(header: str, thoughts: Mapping[str, Any]) -> str:
    """Return ``header`` up to the first delimiter of reasoning. ``thoughts``: the syntax of reasoning."""
    field = thoughts.get("fields", {}).get("reasoning_content", {})
    given = [field.get(name, []) for name in ("open", "close")]
    marks = [mark for each in given for mark in ([each] if isinstance(each, str) else each)]
    return header[: min((header.find(mark) for mark in marks if mark in header), default=len(header))]
