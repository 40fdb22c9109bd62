"""Requests of OpenAI clients: one struct per body, and the SamplingParams that they stand for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from fastdecode.api.sampling_params import MAX_SAMPLES, SamplingParams
from fastdecode.core.errors import RequestError
from fastdecode.server.foreign_fields import IGNORED, check_fields
from fastdecode.server.json_bounds import with_whole_numbers
from fastdecode.server.text_forms import ResponseFormat, asked_form, form_of_text
from fastdecode.server.tool_calls import ForcedCalls, forced_calls

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


Strings = Annotated[list[str], Meta(max_length=1024)]
TokenIds = Annotated[list[int], Meta(max_length=1 << 18)]
LayerNumbers = Annotated[list[int], Meta(max_length=1 << 12)]
TokenBias = Annotated[dict[str, float], Meta(max_length=1 << 16)]
Messages = Annotated[list[dict[str, Any]], Meta(max_length=1 << 14)]


class StreamOptions(msgspec.Struct):
    """``include_usage``: send the token counts in a last chunk. ``continuous_usage_stats``: send them in each chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class SampledRequest(msgspec.Struct, kw_only=True):
    """Sampling fields that all requests for text share; None means the server's default."""

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    min_tokens: int | None = None
    stop: str | Strings | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    bad_words: Strings | None = None
    allowed_token_ids: TokenIds | None = None
    skip_special_tokens: bool | None = None
    logit_bias: TokenBias | None = None
    structured_outputs: dict[str, Any] | None = None
    attention_sources: int | None = None
    attention_source_block: int | None = None
    attention_source_layers: LayerNumbers | None = None


class GenerationRequest(SampledRequest, kw_only=True):
    """Fields that completions and chats share.

    The ``guided_…`` fields are vLLM's older names for the keys of ``structured_outputs``.
    """

    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    response_format: ResponseFormat | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None


SAMPLING = {*SampledRequest.__struct_fields__, "n", "max_tokens", "logprobs"} - {
    "model", "stream", "logit_bias", "structured_outputs",
}  # fmt: skip
"""Fields that are SamplingParams of the same name: OpenAI's, and vLLM's additional ones."""


class CompletionRequest(GenerationRequest, kw_only=True):
    """A completion's body. ``prompt``: text, token ids, or a list of either. ``logprobs``: top tokens per position."""

    prompt: str | list[Any] | None = None
    echo: bool | None = None
    logprobs: int | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    """A chat's body. The chat template renders ``messages`` and ``tools``. ``top_logprobs``: top tokens per position.

    ``tool_choice`` "required" or a named function forces calls. "auto" leaves the text free, and it may contain calls.
    """

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of a request for the token ids of a text (as in a completion) or of messages (as in a chat)."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of a request to turn token ids into text."""

    tokens: list[int]
    model: str | None = None


Body = TypeVar("Body", bound=msgspec.Struct)


def read_body(body: Any, kind: type[Body]) -> tuple[Body, list[str]]:
    """Return the parsed ``body`` as a request struct of type ``kind``, and the names of its unknown fields.

    Raise RequestError, naming the field, if a field is missing, has the wrong type, or is unsupported.
    """
    if not isinstance(body, dict):
        raise RequestError("body must be an object")
    most_fields = 1024
    if len(body) > most_fields:
        raise RequestError(f"the body has {len(body)} fields: it may have {most_fields}")
    check_fields(body, kind.__struct_fields__)
    if kind is CompletionRequest and body.get("prompt") is None:
        raise RequestError("prompt is missing: text, token ids, or a list of either")
    try:
        request = msgspec.convert(with_whole_numbers(body, kind), kind)
    except msgspec.ValidationError as error:
        found = re.fullmatch(r"(.*) - at `\$(?:\.(.*))?`", str(error), re.DOTALL)
        where, what = (found[2] or "body", found[1]) if found else ("body", str(error))
        raise RequestError(f"{where}: {what[:1].lower()}{what[1:]}") from None
    return request, sorted(set(body) - set(kind.__struct_fields__) - IGNORED)


def prompts(request: CompletionRequest) -> list[Any]:
    """Return the prompts of a completion, each a text or a list of token ids."""
    prompt = request.prompt
    several = isinstance(prompt, list) and prompt and all(isinstance(each, str | list) for each in prompt)
    found = list(prompt or ()) if several else [prompt]
    if len(found) * max(request.n or 1, 1) > MAX_SAMPLES:
        raise RequestError(f"prompt: {len(found)} prompts with n={request.n or 1} are more than {MAX_SAMPLES} samples")
    return found


def sampling_params(request: CompletionRequest | ChatRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    """Return ``defaults`` overridden by the request's fields. Raise RequestError or ConfigError for a bad value."""
    asked = {name: getattr(request, name) for name in SAMPLING if getattr(request, name) is not None}
    if isinstance(request, ChatRequest):
        asked = {"max_tokens": None, **defaults, **asked, **_chat_params(request)}
        if not request.logprobs:
            asked.pop("logprobs", None)
    else:
        asked = {**defaults, **asked}
        if request.echo:
            asked |= {"prompt_logprobs": request.logprobs}
            asked["max_tokens"] = 1 if request.max_tokens == 0 else asked.get("max_tokens", 16)
    if request.logit_bias is not None:
        asked["logit_bias"] = _token_keys(request.logit_bias)
    return SamplingParams(**asked, **_structure(request))


def template_arguments(request: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """Return the request's chat template arguments except its messages. Raise RequestError for a bad argument."""
    if request.continue_final_message and request.add_generation_prompt and request.messages:
        raise RequestError("continue_final_message needs add_generation_prompt false")
    more = request.chat_template_kwargs or {}
    # Arguments of a chat template that ``chat_template_kwargs`` may not replace
    known_kwargs = frozenset({
        "chat_template", "tokenize", "conversation", "messages", "tools", "add_generation_prompt", "add_special_tokens",
        "continue_final_message",
    })  # fmt: skip
    taken = sorted(known_kwargs & set(more))
    if taken:
        raise RequestError(f"chat_template_kwargs must not name {taken[0]}: requests set it")
    given: dict[str, Any] = {
        "tools": None if request.tool_choice == "none" else request.tools,
        "add_generation_prompt": request.add_generation_prompt,
        "continue_final_message": request.continue_final_message,
        "add_special_tokens": bool(request.add_special_tokens),
    }
    if request.reasoning_effort is not None:
        given["reasoning_effort"] = request.reasoning_effort
    return {**more, **given}


def forced_calls_of(request: GenerationRequest) -> ForcedCalls | None:
    """Return the tool calls that ``request`` forces; None if none. Raise RequestError for a bad ``tool_choice``."""
    if not isinstance(request, ChatRequest):
        return None
    return forced_calls(request.tools, request.tool_choice, request.parallel_tool_calls is not False)


def _chat_params(request: ChatRequest) -> dict[str, Any]:
    """Return SamplingParams fields whose names or meanings differ in a chat: log-probabilities and ``max_tokens``."""
    if request.top_logprobs and not request.logprobs:
        raise RequestError("logprobs must be true if top_logprobs is given")
    found: dict[str, Any] = {"logprobs": request.top_logprobs or 0} if request.logprobs else {}
    if request.max_completion_tokens is not None:
        found["max_tokens"] = request.max_completion_tokens
    return found


def _structure(request: GenerationRequest) -> dict[str, Any]:
    """Return the SamplingParams field that constrains the answer's text; {} for a free text.

    A ``response_format`` is about text, and so does not apply to calls.
    """
    older = {kind: getattr(request, f"guided_{kind}") for kind in ("json", "regex", "choice", "grammar")}
    given = asked_form(request.structured_outputs, older)
    if forced := forced_calls_of(request):
        if given is not None:
            raise RequestError("tool_choice forces a call, and structured_outputs another form: give one")
        return {"structured_outputs": forced.form}
    form = form_of_text(request.response_format, given)
    return {} if form is None else {"structured_outputs": form}


def _token_keys(bias: Mapping[str, float]) -> dict[Any, float]:
    """Return the logit ``bias`` with integer token ids as keys, not texts. SamplingParams refuses invalid keys."""
    return {int(key) if re.fullmatch("[0-9]{1,18}", key) else key: value for key, value in bias.items()}
