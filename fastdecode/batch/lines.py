"""The lines of OpenAI batch files: requests as the server accepts them in the input, answers in the output."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from fastdecode.api.outputs import RequestOutput
from fastdecode.api.sampling_params import SamplingParams
from fastdecode.core.errors import ConfigError, RequestError
from fastdecode.server.answer_reader import AnswerReading
from fastdecode.server.answers import answer_form, error_body, is_refusal, new_id, whole_answer
from fastdecode.server.logprobs import LogprobForm
from fastdecode.server.protocol import CHAT, COMPLETIONS, ChatRequest, CompletionRequest, read_body
from fastdecode.server.responses_answer import ResponseForm, whole_response
from fastdecode.server.responses_request import RESPONSES, ResponsesRequest, chat_of, messages_of
from fastdecode.server.sources import SourceForm

Asked = CompletionRequest | ChatRequest | ResponsesRequest


@dataclass(frozen=True)
class BatchLine:
    """One request. ``url``: the endpoint, such as /v1/chat/completions; it determines the form of ``body``."""

    custom_id: str
    url: Any
    body: Any
    method: Any = "POST"


def read_line(text: str | bytes, number: int) -> BatchLine:
    """Return the request in ``text``, line ``number`` of an input file.
    Raise ConfigError if the line is no JSON object with a custom_id.
    """
    try:
        line = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"line {number}: not valid JSON: {error}") from None
    if not isinstance(line, dict) or not isinstance(line.get("custom_id"), str) or not line["custom_id"]:
        raise ConfigError(f"line {number}: must be an object with a custom_id, a method, a url and a body")
    return BatchLine(line["custom_id"], line.get("url"), line.get("body"), line.get("method", "POST"))


def read_request(line: BatchLine) -> Asked:
    """Return the request of ``line``.
    Raise RequestError for an unknown endpoint or field: a refusal now is better than hours of wrong work.
    """
    kinds: dict[str, type[Asked]] = {COMPLETIONS: CompletionRequest, CHAT: ChatRequest, RESPONSES: ResponsesRequest}
    kind = kinds.get(line.url) if isinstance(line.url, str) and line.method == "POST" else None
    if kind is None:
        raise RequestError(f"must POST to {COMPLETIONS}, {CHAT} or {RESPONSES}, not {line.url!r:.80}")
    request, unknown = read_body(line.body, kind)
    if unknown:
        raise RequestError(f"{unknown[0]} is not understood; known are {', '.join(sorted(kind.__struct_fields__))}")
    if request.stream:
        raise RequestError("stream: a batch is not streamed")
    if isinstance(request, ResponsesRequest) and (request.background or request.previous_response_id):
        raise RequestError("background and previous_response_id are for a server: a batch stores no responses")
    return request


def chat_asked(request: Asked) -> CompletionRequest | ChatRequest:
    """Return a Responses request as a chat, other requests unchanged. Raise RequestError for an invalid request."""
    return chat_of(request, messages_of(request.input)) if isinstance(request, ResponsesRequest) else request


def answer(
    line: BatchLine,
    request: Asked,
    model: str,
    outputs: Sequence[RequestOutput],
    reading: AnswerReading | None = None,
    logprobs: LogprobForm | None = None,
    params: SamplingParams | None = None,
    sources: SourceForm | None = None,
) -> dict[str, Any]:
    """Return the output line of a finished request. ``outputs``: one per prompt of the request, in order.
    ``reading``: finds reasoning and tool calls in the text. ``sources``: formats attention sources.
    """
    echoes: tuple[str, ...] = ()
    if isinstance(request, CompletionRequest) and request.echo:
        echoes = tuple(output.prompt or "" for output in outputs)
    chat, reading = chat_asked(request), reading or AnswerReading()
    if isinstance(request, ResponsesRequest):
        known, told = (reading, logprobs or LogprobForm()), sources or SourceForm()
        response = ResponseForm(request, params or SamplingParams(), model, new_id(), *known, sources=told)
        body: dict[str, Any] = msgspec.to_builtins(whole_response(response, outputs[0]))
    else:
        body = whole_answer(answer_form(chat, model, new_id(), echoes, None, reading, logprobs, sources), outputs)
    ends = [each for output in outputs for each in output.outputs]
    failed = [str(each.stop_reason) for each in ends if each.finish_reason == "error"]
    return _output_line(line, (400 if all(map(is_refusal, failed)) else 500) if failed else 200, body)


def refusal(line: BatchLine, error: Exception) -> dict[str, Any]:
    """Return the output line of a request that cannot run, with ``error`` and status 400."""
    return _output_line(line, 400, error_body(str(error)))


def _output_line(line: BatchLine, status: int, body: Mapping[str, Any]) -> dict[str, Any]:
    response = {"status_code": status, "request_id": f"req-{uuid.uuid4().hex}", "body": body}
    return {"id": f"batch_req-{uuid.uuid4().hex}", "custom_id": line.custom_id, "response": response, "error": None}
