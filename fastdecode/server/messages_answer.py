"""Answers of Anthropic's Messages API as plain data: whole messages, and events of streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fastdecode.api.outputs import CompletionOutput, RequestOutput
from fastdecode.server.answer_reader import AnswerReading, Thought
from fastdecode.server.call_parts import CallPart, call_id
from fastdecode.server.sources import SourceForm

Event = dict[str, Any]
"""An event of a stream; its "type" says which."""

NO_INPUT = msgspec.Raw(b"{}")


@dataclass(frozen=True)
class MessageForm:
    """The form of one request's answer. ``reading``: how to split the text into reasoning, content and tool calls."""

    model: str
    answer_id: str
    reading: AnswerReading = field(default_factory=AnswerReading)
    created: int = 0
    sources: SourceForm = field(default_factory=SourceForm)

    @property
    def id(self) -> str:
        """The answer's id with Anthropic's prefix."""
        return f"msg_{self.answer_id}"

    def message(self, **told: Any) -> dict[str, Any]:
        """Return Anthropic's message object of this answer, with the fields in ``told`` added or replaced."""
        begun = {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": []}
        return {**begun, "stop_reason": None, "stop_sequence": None, **told}


def usage(num_prompt: int, num_new: int) -> dict[str, int]:
    """Return Anthropic's ``usage`` object for a prompt of ``num_prompt`` tokens and an answer of ``num_new`` tokens."""
    caches = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": num_prompt, **caches, "output_tokens": num_new}


def whole_message(form: MessageForm, output: RequestOutput) -> dict[str, Any]:
    """Return the whole message of a finished request: the same content that its stream's events would add up to."""
    growing, (completion,) = GrowingMessage(form), output.outputs
    blocks: list[dict[str, Any]] = []
    end: Event = {}
    for event in (*growing.grow(completion), *growing.end(output)):
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "input": ""} if _is_call(event) else event["content_block"])
        elif event["type"] == "content_block_delta":
            name, text = list(event["delta"].items())[1]
            blocks[-1]["input" if name == "partial_json" else name] += text
        elif event["type"] == "message_delta":
            end = event
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = _input(block["input"])
    told = {"usage": end["usage"], **form.sources.beside(completion)}
    return form.message(content=blocks or [{"type": "text", "text": ""}], **end["delta"], **told)


def _is_call(event: Event) -> bool:
    return bool(event["content_block"]["type"] == "tool_use")


def _input(text: str) -> msgspec.Raw:
    """Return a tool call's arguments ``text`` as raw JSON; an empty object if the text was truncated."""
    try:
        is_object = isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        is_object = False
    return msgspec.Raw(text.encode()) if is_object else NO_INPUT


class GrowingMessage:
    """The events of one stream: ``begin``, ``grow`` with each output, ``end`` with the last.

    Blocks of reasoning, text and calls follow one another.
    """

    def __init__(self, form: MessageForm) -> None:
        self._form = form
        self._reader = form.reading.reader(form.answer_id)
        self._kind = ""
        self._num_blocks = 0
        self._has_called = False
        self._num_tokens = 0

    def begin(self, num_prompt: int) -> Iterator[Event]:
        """Yield the events before the first block. ``num_prompt``: tokens of the prompt."""
        yield {"type": "message_start", "message": self._form.message(usage=usage(num_prompt, 0))}
        yield {"type": "ping"}

    def grow(self, completion: CompletionOutput) -> Iterator[Event]:
        """Yield events for what is new in ``completion``. The first event has the new tokens' attention sources."""
        for event in self._grow(completion):
            if event["type"] == "content_block_delta":
                event |= self._sources(completion)
            yield event

    def _sources(self, completion: CompletionOutput) -> dict[str, Any]:
        """Return the attention sources of tokens that no event has reported yet; {} if there are none."""
        found = self._form.sources.beside(completion, self._num_tokens)
        self._num_tokens = len(completion.tokens)
        return found if any(found.values()) else {}

    def _grow(self, completion: CompletionOutput) -> Iterator[Event]:
        for piece in self._reader.read(completion.text, completion.finish_reason is not None):
            if isinstance(piece, CallPart):
                yield from self._call(piece)
            elif isinstance(piece, Thought):
                if piece.first or self._kind != "thinking":
                    yield from self._start({"type": "thinking", "thinking": "", "signature": ""})
                yield self._delta(piece.text)
            else:
                if self._kind != "text":
                    yield from self._start({"type": "text", "text": ""})
                yield self._delta(piece)

    def end(self, output: RequestOutput) -> Iterator[Event]:
        """Yield the events that end the stream. ``output``: the last output of the request."""
        (completion,) = output.outputs
        yield from self._stop()
        counts = usage(len(output.prompt_token_ids), len(completion.tokens))
        told = {"usage": counts, **self._sources(completion)}
        yield {"type": "message_delta", "delta": self._reasons(completion), **told}
        yield {"type": "message_stop"}

    def _reasons(self, completion: CompletionOutput) -> dict[str, Any]:
        stopped_by = completion.stop_reason if isinstance(completion.stop_reason, str) else None
        if completion.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if self._has_called:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        return {"stop_reason": "stop_sequence" if stopped_by else "end_turn", "stop_sequence": stopped_by}

    def _call(self, part: CallPart) -> Iterator[Event]:
        self._has_called = True
        if part.first:
            yield from self._start({"type": "tool_use", "id": part.call_id, "name": part.name, "input": NO_INPUT})
        if part.arguments:
            yield self._delta(part.arguments)
        if part.complete:
            yield from self._stop()

    def _start(self, block: dict[str, Any]) -> Iterator[Event]:
        yield from self._stop()
        self._kind = block["type"]
        yield {"type": "content_block_start", "index": self._num_blocks, "content_block": block}

    def _delta(self, text: str) -> Event:
        deltas = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}
        keys = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}
        delta = {"type": deltas[self._kind], keys[self._kind]: text}
        return {"type": "content_block_delta", "index": self._num_blocks, "delta": delta}

    def _stop(self) -> Iterator[Event]:
        """Yield the events that end the open block, if any. Reasoning gets a signature, which clients send back."""
        if not self._kind:
            return
        if self._kind == "thinking":
            signature = call_id(f"{self._form.answer_id}/thinking", self._num_blocks).removeprefix("call_")
            delta = {"type": "signature_delta", "signature": signature}
            yield {"type": "content_block_delta", "index": self._num_blocks, "delta": delta}
        yield {"type": "content_block_stop", "index": self._num_blocks}
        self._num_blocks, self._kind = self._num_blocks + 1, ""
