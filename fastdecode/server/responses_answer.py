"""Answers of OpenAI's Responses API as plain data: whole responses, and typed events of streams."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastdecode.api.outputs import CompletionOutput, RequestOutput
from fastdecode.api.sampling_params import SamplingParams
from fastdecode.server.answer_reader import AnswerReading, Thought, num_thought_tokens
from fastdecode.server.answers import usage_of
from fastdecode.server.call_parts import CallPart, call_id, is_json
from fastdecode.server.logprobs import LogprobForm
from fastdecode.server.responses_request import ResponsesRequest
from fastdecode.server.sources import SourceForm

Event = dict[str, Any]
"""An event of a stream; its "type" says which."""


@dataclass(frozen=True)
class ResponseForm:
    """The form of one request's answer: the request's body and ``params``, and ``reading``, which splits the text."""

    request: ResponsesRequest
    params: SamplingParams
    model: str
    answer_id: str
    reading: AnswerReading = field(default_factory=AnswerReading)
    logprobs: LogprobForm = field(default_factory=LogprobForm)
    created: int = field(default_factory=lambda: int(time.time()))
    sources: SourceForm = field(default_factory=SourceForm)

    @property
    def id(self) -> str:
        """The answer's id with OpenAI's prefix "resp_"."""
        return f"resp_{self.answer_id}"

    def response(self, status: str, items: Sequence[Event] = (), **more: Any) -> dict[str, Any]:
        """Return OpenAI's response object. ``items``: its output items. ``more``: keys that replace those set here."""
        asked = self.request
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": bool(asked.background),
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": self.model,
            "output": list(items),
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": asked.previous_response_id,
            "store": asked.is_stored,
            "temperature": self.params.temperature,
            "text": {"format": (asked.text and asked.text.format) or {"type": "text"}},
            "tool_choice": asked.tool_choice or "auto",
            "tools": asked.tools or [],
            **({"prompt_cache_key": asked.prompt_cache_key} if asked.prompt_cache_key is not None else {}),
            "top_p": self.params.top_p,
            "truncation": "disabled",
            "usage": None,
            **more,
        }


def whole_response(form: ResponseForm, output: RequestOutput) -> dict[str, Any]:
    """Return the response object of a finished request; it is also in the last event of a stream."""
    growing = GrowingResponse(form)
    *_, last = (*growing.begin(), *growing.grow(output.outputs[0]), *growing.end(output))
    response: dict[str, Any] = last["response"]
    return response


def _usage(output: RequestOutput, num_thoughts: int) -> dict[str, Any]:
    counts = usage_of([output])
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {**counts["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": num_thoughts},
        "total_tokens": counts["total_tokens"],
    }


def _status(completion: CompletionOutput) -> str:
    return "incomplete" if completion.finish_reason == "length" else "completed"


def _text_part(text: str, logprobs: list[Event]) -> Event:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _call_item(part: CallPart, answer: str) -> Event:
    number = call_id(answer, part.index).removeprefix("call_")
    item = {"id": f"fc_{number}", "type": "function_call", "call_id": part.call_id}
    return {**item, "name": part.name, "arguments": "", "status": "in_progress"}


class GrowingResponse:
    """The events of one stream: ``begin``, ``grow`` with each output, ``end`` with the last.

    Items follow one another: reasoning, a message, calls. The message begins with the stream if no other item can
    come, else with the message's first text.
    """

    def __init__(self, form: ResponseForm) -> None:
        self._form = form
        self._reader = form.reading.reader(form.answer_id)
        self._items: list[Event] = []
        self._part: Event | None = None
        self._num_events = 0
        self._num_grown = 0
        self._num_tokens = 0

    def begin(self) -> Iterator[Event]:
        """Yield the events before the first token."""
        yield self._event("response.created", response=self._form.response("in_progress"))
        yield self._event("response.in_progress", response=self._form.response("in_progress"))
        if self._form.reading.is_plain:
            yield from self._begin_message()

    def grow(self, completion: CompletionOutput) -> Iterator[Event]:
        """Yield events for the new text and tool calls in ``completion``.

        Each token has its own events. So a stream that is read again has the same events, even if each output then
        has a different number of new tokens.
        """
        for count in range(self._num_grown + 1, len(completion.tokens)):
            yield from self._grow(completion.after(count))
        yield from self._grow(completion)
        self._num_grown = len(completion.tokens)

    def _grow(self, completion: CompletionOutput) -> Iterator[Event]:
        pieces = self._reader.read(completion.text, completion.finish_reason is not None)
        if not pieces and self._form.reading.is_plain:
            pieces = [""]
        for piece in pieces:
            if isinstance(piece, str):
                yield from self._grow_message(piece, completion)
            elif isinstance(piece, Thought):
                yield from self._grow_thoughts(piece, completion)
            else:
                yield from self._end_part("completed")
                yield from self._call_events(piece, completion)

    def end(self, output: RequestOutput) -> Iterator[Event]:
        """Yield the events that end the stream. ``output``: the last output of the request."""
        (completion,) = output.outputs
        if not self._items and not self._form.reading.forced:
            yield from self._begin_message()
        yield from self._end_part(_status(completion))
        usage = _usage(output, num_thought_tokens(self._reader, completion.text_ends))
        response = self._form.response(_status(completion), self._items, usage=usage)
        yield self._event(f"response.{response['status']}", response=response)

    def error(self, message: str, code: str) -> Event:
        """Return the event that ends a failed stream."""
        return self._event("error", message=message, code=code, param=None)

    def _begin_message(self) -> Generator[Event, None, Event]:
        return (yield from self._begin_part("message", _text_part("", []), role="assistant"))

    def _begin_part(self, kind: str, part: Event, **told: Any) -> Generator[Event, None, Event]:
        """Yield the events that begin an item of ``kind`` with one growing ``part``. Return the item."""
        yield from self._end_part("completed")
        number = f"_{len(self._items)}" if self._items else ""
        # Prefixes of item ids, by the item's type
        prefixes = {"message": "msg", "reasoning": "rs"}
        item = {"id": f"{prefixes[kind]}_{self._form.answer_id}{number}", "type": kind, **told}
        self._items.append({**item, "status": "in_progress", "content": []})
        self._part = part
        yield self._item_event("response.output_item.added")
        yield self._part_event("response.content_part.added", part=dict(part))
        return part

    def _grow_message(self, text: str, completion: CompletionOutput) -> Iterator[Event]:
        """Yield events that add ``text`` to the message, with log-probabilities and sources of all new tokens."""
        asked = completion.all_logprobs is not None
        logprobs = self._form.logprobs.of_chat(completion, self._num_tokens) if asked else []
        sources = self._form.sources.beside(completion, self._num_tokens)
        self._num_tokens = len(completion.tokens)
        if not text and not logprobs and not any(sources.values()):
            return
        part = self._growing("message") or (yield from self._begin_message())
        part["text"] += text
        part["logprobs"] += logprobs
        for name, found in sources.items():
            part.setdefault(name, []).extend(found)
        yield self._part_event("response.output_text.delta", delta=text, logprobs=logprobs, **sources)

    def _grow_thoughts(self, thought: Thought, completion: CompletionOutput) -> Iterator[Event]:
        """Yield the events that add ``thought`` to the reasoning. Each block of reasoning is an item of its own."""
        self._num_tokens = len(completion.tokens)
        part = None if thought.first else self._growing("reasoning")
        if part is None:
            part = yield from self._begin_part("reasoning", {"type": "reasoning_text", "text": ""}, summary=[])
        part["text"] += thought.text
        yield self._part_event("response.reasoning_text.delta", delta=thought.text)

    def _growing(self, kind: str) -> Event | None:
        """Return the event that describes the growing part if its item is of ``kind``; else None."""
        return self._part if self._part is not None and self._items[-1]["type"] == kind else None

    def _end_part(self, status: str) -> Iterator[Event]:
        """Yield the events that end the growing item with ``status``; none if no item is growing."""
        part, self._part = self._part, None
        if part is None:
            return
        if part["type"] == "output_text":
            yield self._part_event("response.output_text.done", text=part["text"], logprobs=part["logprobs"])
        else:
            yield self._part_event("response.reasoning_text.done", text=part["text"])
        yield self._part_event("response.content_part.done", part=part)
        self._items[-1] |= {"status": status, "content": [part]}
        yield self._item_event("response.output_item.done")

    def _call_events(self, part: CallPart, completion: CompletionOutput) -> Iterator[Event]:
        if part.first:
            self._items.append(_call_item(part, self._form.answer_id))
            yield self._item_event("response.output_item.added")
        item = self._items[-1]
        item["arguments"] += part.arguments
        where = {"item_id": item["id"], "output_index": len(self._items) - 1}
        if part.arguments:
            yield self._event("response.function_call_arguments.delta", **where, delta=part.arguments)
        if part.complete:
            item["status"] = "completed" if is_json(item["arguments"]) else _status(completion)
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("response.function_call_arguments.done", **where, **done)
            yield self._item_event("response.output_item.done")

    def _item_event(self, kind: str) -> Event:
        return self._event(kind, output_index=len(self._items) - 1, item=dict(self._items[-1]))

    def _part_event(self, kind: str, **told: Any) -> Event:
        where = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, "content_index": 0}
        return self._event(kind, **where, **told)

    def _event(self, kind: str, **told: Any) -> Event:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **told}
