"""The lines of OpenAI batch files, in and out."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastdecode.errors import ConfigError, RequestError
from fastdecode.outputs import CompletionOutput, Logprob, RequestOutput
from fastdecode.sampling_params import SamplingParams

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

_SAMPLING = frozenset(
    {"n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"}
    | {"seed", "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "logit_bias", "logprobs"}
)
"""Fields of a body that are SamplingParams of the same name: OpenAI's, and those that vLLM adds."""

_IGNORED = frozenset({"model", "user", "metadata", "store", "stream", "service_tier"})
"""Say nothing about the text; ``stream`` must be false."""


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


def check_line(line: BatchLine) -> None:
    """RequestError where the request is of a kind that is not answered here."""
    if line.method != "POST" or line.url not in (COMPLETIONS, CHAT):
        raise RequestError(f"must POST to {COMPLETIONS} or {CHAT}, not {line.url!r:.80}")
    if not isinstance(line.body, dict):
        raise RequestError("body must be an object")


def prompts(line: BatchLine) -> list[Any]:
    """The prompts of a completion: one, or each of a list of texts or of lists of token ids."""
    prompt = line.body.get("prompt")
    if prompt is None:
        raise RequestError("prompt is missing: text, token ids, or a list of either")
    several = isinstance(prompt, list) and prompt and all(isinstance(each, str | list) for each in prompt)
    return prompt if several else [prompt]


def sampling_params(line: BatchLine, defaults: dict[str, Any]) -> SamplingParams:
    """The body's over ``defaults``; RequestError or ConfigError for a field that is wrong or not understood."""
    body = {name: value for name, value in line.body.items() if value is not None}
    if "max_completion_tokens" in body:
        body["max_tokens"] = body.pop("max_completion_tokens")
    if body.get("stream"):
        raise RequestError("stream: a batch is not streamed")
    if line.url == CHAT:
        _name_logprobs(body)
    text = "prompt" if line.url == COMPLETIONS else "messages"
    unknown = sorted(set(body) - _SAMPLING - _IGNORED - {text})
    if unknown:
        raise RequestError(f"{unknown[0]} is not understood; known are {', '.join(sorted(_SAMPLING))}")
    if "logit_bias" in body:
        body["logit_bias"] = _token_keys(body["logit_bias"])
    open_ended = {} if line.url == COMPLETIONS else {"max_tokens": None}
    return SamplingParams(**{**open_ended, **defaults, **{name: body[name] for name in _SAMPLING & set(body)}})


def answer(line: BatchLine, model: str, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """The output line of a finished request; ``outputs``: of its prompts, in order."""
    chat = line.url == CHAT
    completions = [completion for output in outputs for completion in output.outputs]
    choices = [
        {
            "index": index,
            **({"message": {"role": "assistant", "content": each.text}} if chat else {"text": each.text}),
            "finish_reason": each.finish_reason,
            "logprobs": (_chat_logprobs if chat else _logprobs)(each),
        }
        for index, each in enumerate(completions)
    ]
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_new = sum(len(each.token_ids) for each in completions)
    body = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new},
    }
    failed = any(each.finish_reason == "error" for each in completions)
    return _output_line(line, 500 if failed else 200, body)


def refusal(line: BatchLine, error: Exception) -> dict[str, Any]:
    """The output line of a request that cannot run."""
    message = " ".join(str(error).split())
    return _output_line(line, 400, {"error": {"message": message, "type": "invalid_request_error", "code": 400}})


def _output_line(line: BatchLine, status: int, body: dict[str, Any]) -> dict[str, Any]:
    response = {"status_code": status, "request_id": f"req-{uuid.uuid4().hex}", "body": body}
    return {"id": f"batch_req-{uuid.uuid4().hex}", "custom_id": line.custom_id, "response": response, "error": None}


def _name_logprobs(body: dict[str, Any]) -> None:
    """A chat says whether and how many apart: ``logprobs`` true, and ``top_logprobs``."""
    wanted, most = body.pop("logprobs", False), body.pop("top_logprobs", 0)
    if not isinstance(wanted, bool) or (most and not wanted):
        raise RequestError("logprobs must be true or false in a chat, and true beside top_logprobs")
    if wanted:
        body["logprobs"] = most


def _logprobs(completion: CompletionOutput) -> dict[str, Any] | None:
    """As OpenAI's completions have them: a list per kind, an entry per token; offsets count from the text's start."""
    if completion.logprobs is None:
        return None
    chosen = list(zip(completion.token_ids, completion.logprobs, strict=False))
    tokens = [_token(token_id, found[token_id]) for token_id, found in chosen]
    starts = [sum(map(len, tokens[:index])) for index in range(len(tokens))]
    return {
        "tokens": tokens,
        "token_logprobs": [found[token_id].logprob for token_id, found in chosen],
        "top_logprobs": [{_token(each, entry): entry.logprob for each, entry in found.items()} for _, found in chosen],
        "text_offset": starts,
    }


def _chat_logprobs(completion: CompletionOutput) -> dict[str, Any] | None:
    """As OpenAI's chats have them: an object per token, with the likeliest ones of its place."""
    if completion.logprobs is None:
        return None
    chosen = zip(completion.token_ids, completion.logprobs, strict=False)
    return {
        "content": [
            {
                **_chat_logprob(token_id, found[token_id]),
                "top_logprobs": [_chat_logprob(each, entry) for each, entry in found.items()],
            }
            for token_id, found in chosen
        ]
    }


def _chat_logprob(token_id: int, entry: Logprob) -> dict[str, Any]:
    token = _token(token_id, entry)
    return {"token": token, "logprob": entry.logprob, "bytes": list(token.encode())}


def _token(token_id: int, entry: Logprob) -> str:
    """The token's text; without a tokenizer its id, as vLLM writes it."""
    return f"token_id:{token_id}" if entry.decoded_token is None else entry.decoded_token


def _token_keys(bias: Any) -> Any:
    """JSON has text as keys where token ids are meant; what is neither is left for SamplingParams to refuse."""
    if not isinstance(bias, dict):
        return bias
    return {int(key) if re.fullmatch("[0-9]{1,18}", key) else key: value for key, value in bias.items()}
