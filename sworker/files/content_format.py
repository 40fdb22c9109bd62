"""Finds out whether a chat template takes a message's content as text or as a list of parts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils.chat_template_utils import render_jinja_template

Format = Literal["string", "openai"]
"""vLLM's names for content formats: ``string`` is text, ``openai`` is [{"type": "text", "text": …}]."""

Render = Callable[[list[dict[str, Any]]], str]
"""A function that renders a conversation by a template."""

MARK = "fastdecodemark"
"""A word put into content to test whether a template shows it."""


def formats_of(template: str, special_tokens: Mapping[str, Any]) -> dict[str, Format]:
    """Return, for each role, the content format that ``template`` takes; a role without entry uses that of "user".

    The syntax of the template determines the format, as in vLLM. If rendering a trial message of some role in this
    format drops the text, that role gets the other format.
    """
    told = told_by_syntax(template)

    def render(conversation: list[dict[str, Any]]) -> str:
        written, _ = render_jinja_template([conversation], chat_template=template, **special_tokens)
        return str(written[0])

    found: dict[str, Format] = {"user": told}
    for role in ("user", "system", "assistant", "tool"):
        found[role] = _format_of_role(role, told, found, render)
    return found


def in_format(content: list[dict[str, str]], kind: Format) -> str | list[dict[str, str]]:
    """Return a message's parts as ``kind``: a list as it is, or one text in which each part starts a new line."""
    return content if kind == "openai" else "\n".join(part["text"] for part in content)


def in_formats(
    messages: list[dict[str, Any]], parts: list[list[dict[str, str]]], formats: Mapping[str, Format]
) -> list[dict[str, Any]]:
    """Return ``messages``, whose contents are texts, with each content in the format of its role.

    ``parts``: the parts of each original message. The first originals may have been joined into one message. A message
    whose text still equals its joined parts gets these parts. Any other text becomes one part.
    """
    given = parts[len(parts) - len(messages) :]
    shaped = []
    for message, own in zip(messages, given, strict=True):
        kept = own if in_format(own, "string") == message["content"] else [{"type": "text", "text": message["content"]}]
        shaped.append({**message, "content": in_format(kept, formats.get(message["role"], formats["user"]))})
    return shaped


def told_by_syntax(template: str) -> Format:
    """Return ``openai`` if a loop of ``template`` iterates over a message's content, else ``string``."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    # Tags that transformers puts around the assistant's text, and that jinja does not know
    generation = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
    try:
        tree = environment.parse(generation.sub("", template))
    except TemplateError:
        return "string"
    return "openai" if any(_loops_over_content(tree)) else "string"


def _format_of_role(role: str, told: Format, found: Mapping[str, Format], render: Render) -> Format:
    other: Format = "string" if told == "openai" else "openai"
    for kind in (told, other):
        if _shows(_trial(role, kind, found), render):
            return kind
    return told


def _shows(conversation: list[dict[str, Any]], render: Render) -> bool:
    """Return whether the rendered ``conversation`` has the text ``MARK``, not merely a printed Python list of parts."""
    try:
        text = render(conversation)
    except Exception:  # a template may reject this conversation by any exception
        return False
    # Matches a list of parts that a template which expects text has printed literally
    printed_part = re.compile(r"""["']type["']\s*:""")
    return MARK in text and not printed_part.search(text)


def _trial(role: str, kind: Format, found: Mapping[str, Format]) -> list[dict[str, Any]]:
    """Return a conversation to render, in which the message of ``role`` is the text ``MARK`` in format ``kind``."""

    def message(name: str, *texts: str) -> dict[str, Any]:
        wanted = kind if name == role else found.get(name, found["user"])
        return {"role": name, "content": in_format([{"type": "text", "text": text} for text in texts], wanted)}

    call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}
    before = {
        "user": [],
        "system": [],
        "assistant": [message("user", "hi")],
        "tool": [message("user", "hi"), message("assistant") | {"tool_calls": [call]}],
    }
    marked = message(role, MARK) | ({"tool_call_id": "call00000", "name": "f"} if role == "tool" else {})
    after = [] if role in ("user", "tool") else [message("user", "hi")]
    return [*before[role], marked, *after]


def _loops_over_content(tree: nodes.Template) -> Iterator[bool]:
    """Yield True for each loop over a message's content, also under other names, through assignments and calls."""
    messages = _names_of(tree, {"messages"}, None)
    items = {
        loop.target.name
        for loop in tree.find_all(nodes.For)
        if isinstance(loop.target, nodes.Name) and any(_reads(loop.iter, name, None) for name in messages)
    }
    contents = _names_of(tree, items, "content")
    for loop in tree.find_all(nodes.For):
        yield any(_reads(loop.iter, name, "content") for name in items)
        yield any(_reads(loop.iter, name, None) for name in contents - items)
    for macro in tree.find_all(nodes.Macro):
        names = _given_content(tree, macro, items, contents - items)
        yield any(_reads(loop.iter, name, None) for loop in macro.find_all(nodes.For) for name in names)


def _given_content(tree: nodes.Template, macro: nodes.Macro, items: set[str], contents: set[str]) -> set[str]:
    calls = [
        call for call in tree.find_all(nodes.Call) if isinstance(call.node, nodes.Name) and call.node.name == macro.name
    ]
    given = [(macro.args[i].name, arg) for call in calls for i, arg in enumerate(call.args[: len(macro.args)])]
    given += [(keyword.key, keyword.value) for call in calls for keyword in call.kwargs]
    return {
        name
        for name, value in given
        if any(_reads(value, item, "content") for item in items) or any(_reads(value, each, None) for each in contents)
    }


def _names_of(tree: nodes.Template, names: set[str], key: str | None) -> set[str]:
    """Return ``names`` and variables assigned from them; with ``key``, only variables assigned from ``name[key]``."""
    known = set(names)
    while True:
        more = {
            assign.target.name
            for assign in tree.find_all(nodes.Assign)
            if isinstance(assign.target, nodes.Name)
            and (
                any(_reads(assign.node, name, key) for name in names)
                or any(_reads(assign.node, name, None) for name in known - (names if key else set()))
            )
        }
        if more <= known:
            return known
        known |= more


def _reads(node: nodes.Node | None, name: str, key: str | None) -> bool:
    """Return whether ``node`` is variable ``name`` or, with ``key``, ``name[key]``; filters and slices are ignored."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if key is None:
        return isinstance(node, nodes.Name) and node.name == name
    if isinstance(node, nodes.Getitem):
        return _reads(node.node, name, None) and isinstance(node.arg, nodes.Const) and node.arg.value == key
    return isinstance(node, nodes.Getattr) and node.attr == key and _reads(node.node, name, None)
