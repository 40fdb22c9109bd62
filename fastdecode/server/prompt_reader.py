"""Turns the prompts of API requests into token ids for the engine, or refuses them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastdecode.api.text import Tokenizer, encode_text, read_prompt
from fastdecode.core.errors import RequestError
from fastdecode.server.protocol import ChatRequest, CompletionRequest, TokenizeRequest, prompts, template_arguments


@dataclass(frozen=True)
class PromptTokens:
    """A prompt's token ids, and the text that they were tokenized from, if any."""

    token_ids: list[int]
    text: str | None = None

    def for_engine(self) -> dict[str, Any]:
        """Return the prompt as the argument that ``LLMEngine.add_request`` takes."""
        return {"prompt": self.text, "prompt_token_ids": self.token_ids}


@dataclass(frozen=True)
class PromptReader:
    """Tokenizes the prompts of requests for the served model.

    ``tokenizer``: None allows only token ids. ``template``: chat template arguments of every conversation. Any thread
    may call its methods.
    """

    tokenizer: Tokenizer | None
    vocab_size: int
    max_model_len: int
    template: Mapping[str, Any]

    def read(self, request: CompletionRequest | ChatRequest) -> list[PromptTokens]:
        """Return the prompts of a request; a completion may have several. Raise RequestError for an invalid prompt."""
        if isinstance(request, ChatRequest):
            return [self._encode(self._encode_chat(request.messages, **template_arguments(request)))]
        return [self._encode(prompt, request.add_special_tokens is not False) for prompt in prompts(request)]

    def check_room(self, request: CompletionRequest | ChatRequest, found: Sequence[PromptTokens]) -> None:
        """Raise RequestError if prompts ``found`` plus the new tokens of ``request`` exceed the model's length."""
        name = "max_tokens" if getattr(request, "max_completion_tokens", None) is None else "max_completion_tokens"
        wanted, longest = getattr(request, name), max(len(each.token_ids) for each in found)
        if wanted is not None and wanted > self.max_model_len - longest:
            raise RequestError(
                f"{name} is too large: {wanted}; max_model_len is {self.max_model_len} tokens, and the prompt has "
                f"{longest}, which leaves room for {self.max_model_len - longest}"
            )

    def tokenize(self, request: TokenizeRequest) -> list[int]:
        """Return the token ids of a text or a conversation. Raise RequestError for an invalid one."""
        if (request.prompt is None) == (request.messages is None):
            raise RequestError("give either prompt or messages")
        if request.messages is None:
            special = request.add_special_tokens is not False
            return encode_text(request.prompt, self.tokenizer, self.max_model_len, special)
        return self._encode_chat(request.messages, **template_arguments(request))

    def count(self, request: ChatRequest) -> int:
        """Return the number of tokens of a conversation. Raise RequestError for an invalid one."""
        return len(self._encode_chat(request.messages, **template_arguments(request)))

    def texts(self, found: Sequence[PromptTokens]) -> tuple[str, ...]:
        """Return the text of each prompt in ``found``; "" without a tokenizer."""
        if self.tokenizer is None:
            return ("",) * len(found)
        decode = self.tokenizer.backend.decode
        return tuple(decode(each.token_ids) if each.text is None else each.text for each in found)

    def _encode(self, prompt: Any, add_special_tokens: bool = True) -> PromptTokens:
        text, ids = read_prompt(prompt, self.tokenizer, self.vocab_size, self.max_model_len, add_special_tokens)
        return PromptTokens(ids, text)

    def _encode_chat(self, messages: list[dict[str, Any]], **arguments: Any) -> list[int]:
        if self.tokenizer is None:
            raise RequestError("messages need a tokenizer, and it was not loaded (skip_tokenizer_init)")
        return self.tokenizer.encode_chat(messages, self.max_model_len, **{**self.template, **arguments})
