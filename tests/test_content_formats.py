"""Contents as text or as parts, as a chat template takes them: no word of a conversation is dropped."""

from __future__ import annotations

from typing import Any

import pytest

from fastdecode.api.config import EngineConfig
from fastdecode.core.errors import ConfigError
from fastdecode.server.server_settings import ServerSettings
from fastdecode.sworker.files.content_format import told_by_syntax
from fastdecode.sworker.model.tokenizer import HFTokenizer

TEXT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
PARTS = (
    "{% for m in messages %}<{{ m['role'] }}>{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)
EITHER = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
)
BY_NAME = (
    "{% set loop_messages = messages[0:] %}{% for message in loop_messages %}{% set content = message.content | list %}"
    "<{{ message.role }}>{% for part in content %}{{ part.text }}{% endfor %}{% endfor %}"
)
BY_MACRO = (
    "{% macro show(content) %}{% for part in content %}{{ part.text }}{% endfor %}{% endmacro %}"
    "{% for m in messages %}<{{ m.role }}>{{ show(m.content) }}{% endfor %}"
)
BY_INDEX = (
    "{% for m in messages %}<{{ m.role }}>{% for i in range(m.content | length) %}{{ m.content[i].text }}"
    "{% endfor %}{% endfor %}"
)
SYSTEM_AS_TEXT = (
    "{% if messages[0].role == 'system' %}<system>{{ messages[0].content | trim }}{% set messages = messages[1:] %}"
    "{% endif %}{% for m in messages %}<{{ m.role }}>{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
)
PICTURES = (
    "{% for m in messages %}<{{ m.role }}>{% for part in m.content if part.type == 'image' %}<image>{% endfor %}"
    "{{ m.content }}{% endfor %}"
)
GENERATION = (
    "{% for m in messages %}<{{ m.role }}>{% generation %}{% for part in m.content %}{{ part.text }}{% endfor %}"
    "{% endgeneration %}{% endfor %}"
)
TEMPLATES = {
    "text": TEXT, "parts": PARTS, "either": EITHER, "by name": BY_NAME, "by macro": BY_MACRO, "by index": BY_INDEX,
    "system as text": SYSTEM_AS_TEXT, "pictures": PICTURES, "generation": GENERATION,
}  # fmt: skip
CONVERSATION = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "one"}]},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
]

TOKENIZER = HFTokenizer(EngineConfig())


def written(template: str, conversation: list[dict[str, Any]]) -> str:
    """Return what ``template`` makes of ``conversation``, by the demo model's tokenizer."""
    told = {"chat_template": template, "add_generation_prompt": False}
    return str(TOKENIZER.backend.decode(TOKENIZER.encode_chat(conversation, 256, **told)))


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_word_reaches_the_prompt_once(name: str) -> None:
    assert written(TEMPLATES[name], CONVERSATION) == "<system>be brief<user>one<assistant>two<user>three"


def test_syntax_decides_as_in_vllm_where_both_are_taken() -> None:
    found = {name: told_by_syntax(template) for name, template in TEMPLATES.items()}
    by_parts = {"parts", "either", "by name", "by macro", "system as text", "pictures", "generation"}
    assert {name for name, kind in found.items() if kind == "openai"} == by_parts
    several = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert written(EITHER, several) == "<user>ab" and written(TEXT, several) == "<user>a\nb"


def test_a_template_with_a_rule_of_its_own_for_results_of_tools_keeps_them() -> None:
    tool = "{% if m['role'] == 'tool' %}{{ m['content'] }}{% endif %}"
    template = PARTS.replace("<{{ m['role'] }}>", "<{{ m['role'] }}>" + tool)
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    conversation = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "42"},
    ]
    assert written(template, conversation) == "<user>hi<assistant><tool>42"


def test_what_the_user_says_counts_more() -> None:
    assert ServerSettings(chat_template_content_format="openai").chat_template_content_format == "openai"
    with pytest.raises(ConfigError, match="chat_template_content_format must be one of auto, string, openai"):
        ServerSettings(chat_template_content_format="parts")

    def prompt(kind: str) -> str:
        told = {"chat_template": EITHER, "content_format": kind, "add_generation_prompt": False}
        messages = [{"role": "user", "content": [{"type": "text", "text": text} for text in "ab"]}]
        return str(TOKENIZER.backend.decode(TOKENIZER.encode_chat(messages, 256, **told)))

    assert [prompt(kind) for kind in ("auto", "openai", "string")] == ["<user>ab", "<user>ab", "<user>a\nb"]
    with pytest.raises(ConfigError, match="content_format must be one of"):
        prompt("parts")
    developer = [{"role": "developer", "content": "be brief"}, *CONVERSATION]
    assert written(PARTS, developer) == "<system>be brief\n\nbe brief<user>one<assistant>two<user>three"
