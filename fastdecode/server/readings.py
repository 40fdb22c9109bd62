"""Decides how to split each answer into content, reasoning and tool calls: by model and by request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastdecode.api.sampling_params import SamplingParams
from fastdecode.core.errors import ConfigError
from fastdecode.server.answer_reader import AnswerReading
from fastdecode.server.prompt_reader import PromptTokens
from fastdecode.server.protocol import ChatRequest, CompletionRequest, forced_calls_of, sampling_params
from fastdecode.server.response_templates import NO_ANCHOR, AnswerSyntax, answer_syntax


class Readings:
    """Knows the syntax of the served model's answers: reasoning and tool calls. Any thread may use it."""

    def __init__(
        self,
        tokenizer: Any,
        chat_template: str | None = None,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
    ) -> None:
        """``tokenizer``: None if the model has none. ``chat_template``: None for the tokenizer's own.

        Raise ConfigError for an unknown parser.
        """
        self._tokenizer = tokenizer
        self._syntax: AnswerSyntax | None = None
        if tokenizer is None:
            if tool_call_parser or reasoning_parser:
                raise ConfigError("tool_call_parser and reasoning_parser need a tokenizer (skip_tokenizer_init)")
            return
        text, header = tokenizer.chat_template_text(chat_template), tokenizer.answer_header(chat_template)
        own = tokenizer.response_template if chat_template is None else None
        self._syntax = answer_syntax(text, header, own, tool_call_parser, reasoning_parser)
        self._special_tokens: Mapping[str, int] = tokenizer.special_tokens

    def of(self, request: ChatRequest | CompletionRequest, prompts: Sequence[PromptTokens]) -> AnswerReading:
        """Return how to split answers to ``request``. Raise RequestError if it asks to force impossible tool calls."""
        if not isinstance(request, ChatRequest):
            return AnswerReading()
        forced, syntax = forced_calls_of(request), self._syntax_for(request)
        if forced or syntax is None:
            return AnswerReading(forced)
        template = syntax.with_calls
        prompt = "" if template.has_begun(NO_ANCHOR) else self._end(prompts[0].token_ids, template.has_begun)
        form = request.response_format
        return AnswerReading(
            syntax=syntax,
            tools=request.tools if _may_call(request) else None,
            prompt=prompt,
            is_json=form is not None and form.type != "text",
            parallel=request.parallel_tool_calls is not False,
        )

    def sampling_params(self, request: ChatRequest | CompletionRequest, defaults: Mapping[str, Any]) -> SamplingParams:
        """Return ``defaults`` overridden by the request's fields; keep the tokens that delimit reasoning or calls."""
        syntax = self._syntax_for(request) if isinstance(request, ChatRequest) else None
        if syntax and isinstance(request, ChatRequest):
            markers = (syntax.with_calls if _may_call(request) else syntax.without).markers
            shown = tuple(token_id for text, token_id in self._special_tokens.items() if text in markers)
            defaults = {**defaults, "shown_special_token_ids": shown} if shown else defaults
        return sampling_params(request, defaults)

    def _syntax_for(self, request: ChatRequest) -> AnswerSyntax | None:
        return self._syntax.for_request(_may_call(request)) if self._syntax else None

    def _end(self, token_ids: Sequence[int], has_begun: Any) -> str:
        """Return the text of the prompt's last tokens, or of the whole prompt if ``has_begun`` does not accept it."""
        decode = self._tokenizer.backend.decode
        # Number of last prompt tokens to search first for the header of the answer
        near_tokens = 64
        near: str = decode(list(token_ids[-near_tokens:]), skip_special_tokens=False)
        if has_begun(near) or len(token_ids) <= near_tokens:
            return near
        whole: str = decode(list(token_ids), skip_special_tokens=False)
        return whole


def _may_call(request: ChatRequest) -> bool:
    """Return whether the model may call tools of its own accord: tools are offered, and no call is forced."""
    return bool(request.tools) and request.tool_choice in (None, "auto")
