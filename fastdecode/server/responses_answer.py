"""OpenAI's Responses API, what is answered: whole responses, and the typed events of streams, as plain data."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastdecode.api.outputs import CompletionOutput, RequestOutput
from fastdecode.api.sampling_params import SamplingParams
from fastdecode.server.answers import chat_logprobs, usage_of
from fastdecode.server.responses_request import ResponsesRequest
from fastdecode.server.tool_calls import CallPart, CallReader, ForcedCalls

Event = dict[str, Any]
"""Of a stream; its "type" says which."""


@dataclass(frozen=True)
class ResponseForm:
    """How the answer of one request looks: what was asked, and with which ``params``; ``forced``: the calls that the
    text is, where it is no free text."""

    request: ResponsesRequest
    params: SamplingParams
    model: str
    answer_id: str
    forced: ForcedCalls | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def response(self, status: str, items: Sequence[Event] = (), **more: Any) -> dict[str, Any]:
        """The response object. ``items``: its output; ``more``: keys in place of those here."""
        asked = self.request
        return {
            "id": f"resp_{self.answer_id}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": self.model,
            "output": list(items),
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": self.params.temperature,
            "text": {"format": (asked.text and asked.text.format) or {"type": "text"}},
            "tool_choice": asked.tool_choice or "auto",
            "tools": asked.tools or [],
            "top_p": self.params.top_p,
            "truncation": "disabled",
            "usage": None,
            **more,
        }


def whole_response(form: ResponseForm, output: RequestOutput) -> dict[str, Any]:
    """The response of a finished request."""
    (completion,) = output.outputs
    return _finished(form, output, _items(form, completion))


def _finished(form: ResponseForm, output: RequestOutput, items: Sequence[Event]) -> dict[str, Any]:
    counts = usage_of([output])
    usage = {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
    }
    return form.response(_status(output.outputs[0]), items, usage=usage)


def _items(form: ResponseForm, completion: CompletionOutput) -> list[Event]:
    """The finished output: calls where these are forced, else one message."""
    status = _status(completion)
    if form.forced:
        parts = CallReader(form.forced).read(completion.text, finished=True)
        return [_call_item(part, part.arguments, status if form.forced.name else "completed") for part in parts]
    return [_message_item(form, status, [_text_part(form, completion)])]


def _status(completion: CompletionOutput) -> str:
    return "incomplete" if completion.finish_reason == "length" else "completed"


def _message_item(form: ResponseForm, status: str, content: Sequence[Event] = ()) -> Event:
    item = {"id": f"msg_{form.answer_id}", "type": "message", "role": "assistant"}
    return {**item, "status": status, "content": list(content)}


def _text_part(form: ResponseForm, completion: CompletionOutput | None = None) -> Event:
    text = completion.text if completion else ""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": _logprobs(completion, 0)}


def _logprobs(completion: CompletionOutput | None, start: int) -> list[Event]:
    if completion is None or completion.all_logprobs is None:
        return []
    return chat_logprobs(completion, start)


def _call_item(part: CallPart, arguments: str, status: str) -> Event:
    item = {"id": f"fc_{part.call_id.removeprefix('call_')}", "type": "function_call", "call_id": part.call_id}
    return {**item, "name": part.name, "arguments": arguments, "status": status}


class GrowingResponse:
    """The events of one stream: ``begin``, ``grow`` with each output, ``end`` with the last one."""

    def __init__(self, form: ResponseForm) -> None:
        self._form = form
        self._calls = CallReader(form.forced) if form.forced else None
        self._items: list[Event] = []
        self._num_events = 0
        self._num_shown = 0
        self._num_tokens = 0

    def begin(self) -> Iterator[Event]:
        """What comes before any text."""
        yield self._event("response.created", response=self._form.response("in_progress"))
        yield self._event("response.in_progress", response=self._form.response("in_progress"))
        if self._calls is None:
            item = _message_item(self._form, "in_progress")
            yield self._event("response.output_item.added", output_index=0, item=item)
            yield self._part_event("response.content_part.added", part=_text_part(self._form))

    def grow(self, completion: CompletionOutput) -> Iterator[Event]:
        """What is new of the text, or of the calls."""
        if self._calls:
            for part in self._calls.read(completion.text, completion.finish_reason is not None):
                yield from self._call_events(part, completion)
            return
        text, logprobs = completion.text[self._num_shown :], _logprobs(completion, self._num_tokens)
        self._num_shown, self._num_tokens = len(completion.text), len(completion.tokens)
        if text or logprobs:
            yield self._part_event("response.output_text.delta", delta=text, logprobs=logprobs)

    def end(self, output: RequestOutput) -> Iterator[Event]:
        """What comes after the last output."""
        (completion,) = output.outputs
        if self._calls is None:
            part = _text_part(self._form, completion)
            done = {"text": part["text"], "logprobs": part["logprobs"]}
            yield self._part_event("response.output_text.done", **done)
            yield self._part_event("response.content_part.done", part=part)
            self._items.append(_message_item(self._form, _status(completion), [part]))
            yield self._event("response.output_item.done", output_index=0, item=self._items[0])
        response = _finished(self._form, output, self._items)
        yield self._event(f"response.{response['status']}", response=response)

    def error(self, message: str, code: str) -> Event:
        """What a stream that fails ends with."""
        return self._event("error", message=message, code=code, param=None)

    def _call_events(self, part: CallPart, completion: CompletionOutput) -> Iterator[Event]:
        if part.first:
            self._items.append(_call_item(part, "", "in_progress"))
            yield self._event("response.output_item.added", output_index=part.index, item=dict(self._items[-1]))
        item = self._items[-1]
        item["arguments"] += part.arguments
        where = {"item_id": item["id"], "output_index": part.index}
        if part.arguments:
            yield self._event("response.function_call_arguments.delta", **where, delta=part.arguments)
        if part.complete:
            item["status"] = _status(completion) if self._form.forced and self._form.forced.name else "completed"
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("response.function_call_arguments.done", **where, **done)
            yield self._event("response.output_item.done", output_index=part.index, item=dict(item))

    def _part_event(self, kind: str, **told: Any) -> Event:
        return self._event(kind, item_id=f"msg_{self._form.answer_id}", output_index=0, content_index=0, **told)

    def _event(self, kind: str, **told: Any) -> Event:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **told}
