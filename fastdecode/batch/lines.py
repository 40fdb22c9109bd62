"""The lines of OpenAI batch files, in and out."""

from __future__ import annotations

import json
import re
import time
import uuid
from dataclasses import dataclass
from typing import Any

from fastdecode.errors import ConfigError, RequestError
from fastdecode.outputs import RequestOutput
from fastdecode.sampling_params import SamplingParams

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

_SAMPLING = frozenset(
    {"n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"}
    | {"seed", "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "logit_bias"}
)
"""Fields of a body that are SamplingParams of the same name: OpenAI's, and those that vLLM adds."""

_IGNORED = frozenset({"model", "user", "metadata", "store", "stream", "service_tier"})
"""Say nothing about the text; ``stream`` must be false."""


@dataclass(frozen=True)
class BatchLine:
    """One request: ``url`` says which kind, ``body`` is as OpenAI's API takes it."""

    custom_id: str
    url: str
    body: dict[str, Any]


def read_line(text: str, number: int) -> BatchLine:
    """Line ``number`` of an input file; ConfigError when it is not one of a batch at all."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"line {number}: not valid JSON: {error}") from None
    if not isinstance(line, dict) or not isinstance(line.get("custom_id"), str) or not line["custom_id"]:
        raise ConfigError(f"line {number}: must be an object with a custom_id, a method, a url and a body")
    if line.get("method", "POST") != "POST" or line.get("url") not in (COMPLETIONS, CHAT):
        raise ConfigError(f"line {number}: must POST to {COMPLETIONS} or {CHAT}, not {line.get('url')!r:.80}")
    if not isinstance(line.get("body"), dict):
        raise ConfigError(f"line {number}: body must be an object")
    return BatchLine(line["custom_id"], line["url"], line["body"])


def sampling_params(line: BatchLine, defaults: dict[str, Any]) -> SamplingParams:
    """The body's over ``defaults``; RequestError or ConfigError for a field that is wrong or not understood."""
    body = {name: value for name, value in line.body.items() if value is not None}
    if "max_completion_tokens" in body:
        body["max_tokens"] = body.pop("max_completion_tokens")
    if body.get("stream"):
        raise RequestError("stream: a batch is not streamed")
    text = "prompt" if line.url == COMPLETIONS else "messages"
    unknown = sorted(set(body) - _SAMPLING - _IGNORED - {text})
    if unknown:
        raise RequestError(f"{unknown[0]} is not understood; known are {', '.join(sorted(_SAMPLING))}")
    if "logit_bias" in body:
        body["logit_bias"] = _token_keys(body["logit_bias"])
    open_ended = {} if line.url == COMPLETIONS else {"max_tokens": None}
    return SamplingParams(**{**open_ended, **defaults, **{name: body[name] for name in _SAMPLING & set(body)}})


def answer(line: BatchLine, model: str, output: RequestOutput) -> dict[str, Any]:
    """The output line of a finished request."""
    chat = line.url == CHAT
    choices = [
        {
            "index": each.index,
            **({"message": {"role": "assistant", "content": each.text}} if chat else {"text": each.text}),
            "finish_reason": each.finish_reason,
            "logprobs": None,
        }
        for each in output.outputs
    ]
    num_prompt, num_new = len(output.prompt_token_ids), sum(len(each.token_ids) for each in output.outputs)
    body = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new},
    }
    failed = any(each.finish_reason == "error" for each in output.outputs)
    return _output_line(line, 500 if failed else 200, body)


def refusal(line: BatchLine, error: Exception) -> dict[str, Any]:
    """The output line of a request that cannot run."""
    message = " ".join(str(error).split())
    return _output_line(line, 400, {"error": {"message": message, "type": "invalid_request_error", "code": 400}})


def _output_line(line: BatchLine, status: int, body: dict[str, Any]) -> dict[str, Any]:
    response = {"status_code": status, "request_id": f"req-{uuid.uuid4().hex}", "body": body}
    return {"id": f"batch_req-{uuid.uuid4().hex}", "custom_id": line.custom_id, "response": response, "error": None}


def _token_keys(bias: Any) -> Any:
    """JSON has text as keys where token ids are meant; what is neither is left for SamplingParams to refuse."""
    if not isinstance(bias, dict):
        return bias
    return {int(key) if re.fullmatch("[0-9]{1,18}", key) else key: value for key, value in bias.items()}
