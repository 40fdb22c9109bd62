"""The table of response templates, and vLLM's names of the parsers that they replace.

``response_templates.json`` has a list for tool calls and one for reasoning. Each entry has vLLM's names, texts that
identify a chat template (the first match wins), and fields of a response template.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from fastdecode.core.errors import ConfigError

OF_TOKENIZER = "hf"
"""vLLM's name of the parser that follows the tokenizer's response template."""


@lru_cache(1)
def _table() -> dict[str, list[dict[str, Any]]]:
    table = Path(__file__).with_name("response_templates.json")
    found: dict[str, list[dict[str, Any]]] = json.loads(table.read_text(encoding="utf-8"))
    return found


def parser_names(kind: str) -> list[str]:
    """Return the accepted parser names of ``kind``, "tools" or "reasoning"."""
    return sorted([OF_TOKENIZER, *(name for entry in _table()[kind] for name in entry["names"])])


def check_parser_names(tool_call_parser: str | None, reasoning_parser: str | None) -> None:
    """Raise ConfigError for a name that is not in the table."""
    for kind, name in (("tools", tool_call_parser), ("reasoning", reasoning_parser)):
        if name and name not in parser_names(kind):
            flag = "tool_call_parser" if kind == "tools" else "reasoning_parser"
            raise ConfigError(
                f"{flag} must be one of {', '.join(parser_names(kind))}, got {name!r:.80}; without it the chat "
                "template chooses"
            )


def entry_of(kind: str, name: str | None, chat_template: str) -> dict[str, Any]:
    """Return the entry of parser ``name``, else the first entry whose texts are in ``chat_template``, else {}."""
    for entry in _table()[kind]:
        suits = any(all(text in chat_template for text in texts) for texts in entry["recognized_by"])
        if (name in entry["names"]) if name else suits:
            return entry
    return {}
