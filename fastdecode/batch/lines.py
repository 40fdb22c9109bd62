"""The lines of OpenAI batch files, in and out; the requests in them are those of the server."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastdecode.api.outputs import RequestOutput
from fastdecode.core.errors import ConfigError, RequestError
from fastdecode.server.answers import answer_form, error_body, is_refusal, new_id, whole_answer
from fastdecode.server.logprobs import LogprobForm
from fastdecode.server.protocol import CHAT, COMPLETIONS, ChatRequest, CompletionRequest, read_body

_KINDS: dict[str, type[CompletionRequest] | type[ChatRequest]] = {COMPLETIONS: CompletionRequest, CHAT: ChatRequest}


@dataclass(frozen=True)
class BatchLine:
    """One request: ``url`` says which kind, ``body`` is as OpenAI's API takes it."""

    custom_id: str
    url: Any
    body: Any
    method: Any = "POST"


def read_line(text: str | bytes, number: int) -> BatchLine:
    """Line ``number`` of an input file; ConfigError where it is no JSON object with a custom_id to answer."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"line {number}: not valid JSON: {error}") from None
    if not isinstance(line, dict) or not isinstance(line.get("custom_id"), str) or not line["custom_id"]:
        raise ConfigError(f"line {number}: must be an object with a custom_id, a method, a url and a body")
    return BatchLine(line["custom_id"], line.get("url"), line.get("body"), line.get("method", "POST"))


def read_request(line: BatchLine) -> CompletionRequest | ChatRequest:
    """RequestError where the request is of a kind that is not answered here, or has a field that is not understood:
    better than hours of work with it ignored."""
    kind = _KINDS.get(line.url) if isinstance(line.url, str) and line.method == "POST" else None
    if kind is None:
        raise RequestError(f"must POST to {COMPLETIONS} or {CHAT}, not {line.url!r:.80}")
    request, unknown = read_body(line.body, kind)
    if unknown:
        raise RequestError(f"{unknown[0]} is not understood; known are {', '.join(sorted(kind.__struct_fields__))}")
    if request.stream:
        raise RequestError("stream: a batch is not streamed")
    return request


def answer(
    line: BatchLine,
    request: CompletionRequest | ChatRequest,
    model: str,
    outputs: Sequence[RequestOutput],
    logprobs: LogprobForm | None = None,
) -> dict[str, Any]:
    """The output line of a finished request; ``outputs``: of its prompts, in order."""
    echoes: tuple[str, ...] = ()
    if isinstance(request, CompletionRequest) and request.echo:
        echoes = tuple(output.prompt or "" for output in outputs)
    form = answer_form(request, model, new_id(), echoes, logprobs=logprobs)
    body = whole_answer(form, outputs)
    failed = [str(choice["stop_reason"]) for choice in body["choices"] if choice["finish_reason"] == "error"]
    return _output_line(line, (400 if all(map(is_refusal, failed)) else 500) if failed else 200, body)


def refusal(line: BatchLine, error: Exception) -> dict[str, Any]:
    """The output line of a request that cannot run."""
    return _output_line(line, 400, error_body(str(error)))


def _output_line(line: BatchLine, status: int, body: Mapping[str, Any]) -> dict[str, Any]:
    response = {"status_code": status, "request_id": f"req-{uuid.uuid4().hex}", "body": body}
    return {"id": f"batch_req-{uuid.uuid4().hex}", "custom_id": line.custom_id, "response": response, "error": None}
