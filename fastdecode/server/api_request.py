"""One API request that is under way, or has ended: what was asked, how its answer looks, and its exchange."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fastdecode.api.sampling_params import SamplingParams
from fastdecode.api.text import Tokenizer
from fastdecode.server.answer_reader import AnswerReading
from fastdecode.server.answers import AnswerForm, answer_form
from fastdecode.server.exchanges import Exchange
from fastdecode.server.kept_files import KeptRequest
from fastdecode.server.logprobs import logprob_form
from fastdecode.server.messages_answer import MessageForm
from fastdecode.server.messages_request import MESSAGES, MessagesRequest, chat_of_messages
from fastdecode.server.protocol import CHAT, COMPLETIONS, ChatRequest, CompletionRequest
from fastdecode.server.responses_answer import ResponseForm
from fastdecode.server.responses_request import RESPONSES, ResponsesRequest, chat_of

Asked = CompletionRequest | ChatRequest | ResponsesRequest | MessagesRequest

KINDS: dict[str, type[Asked]] = {
    COMPLETIONS: CompletionRequest, CHAT: ChatRequest, RESPONSES: ResponsesRequest, MESSAGES: MessagesRequest
}  # fmt: skip

ID_PREFIXES = {COMPLETIONS: "cmpl-", CHAT: "chatcmpl-", RESPONSES: "resp_", MESSAGES: "msg_"}
"""By route: what ids of answers begin with, before the part that is the answer's own."""


@dataclass(eq=False)
class ApiRequest:
    """``messages``: of a response, its conversation so far but for instructions, which a later one may go on with."""

    asked: Asked
    exchange: Exchange
    form: AnswerForm | ResponseForm | MessageForm
    messages: list[dict[str, Any]] = field(default_factory=list)

    @property
    def answer_id(self) -> str:
        """That of its exchange."""
        return self.exchange.exchange_id

    @property
    def route(self) -> str:
        """Where it was asked."""
        return next(route for route, kind in KINDS.items() if type(self.asked) is kind)

    @property
    def in_background(self) -> bool:
        """True if it runs without a client."""
        return isinstance(self.asked, ResponsesRequest) and bool(self.asked.background)

    @property
    def is_stored(self) -> bool:
        """True if its answer may be asked for later."""
        return isinstance(self.asked, ResponsesRequest) and self.asked.is_stored

    def kept(self) -> KeptRequest:
        """Return what is written of it as long as it runs."""
        prompts = [(each.token_ids, each.text) for each in self.exchange.prompts]
        body = msgspec.to_builtins(self.asked)
        return KeptRequest(self.answer_id, self.route, body, self.form.created, prompts, self.messages)


def chat_meant(asked: Asked, messages: list[dict[str, Any]]) -> ChatRequest | CompletionRequest:
    """Return what the engine is asked, which may be ``asked`` itself. ``messages``: of a response's conversation."""
    if isinstance(asked, ResponsesRequest):
        return chat_of(asked, messages)
    return chat_of_messages(asked) if isinstance(asked, MessagesRequest) else asked


def form_of(
    asked: Asked, chat: ChatRequest | CompletionRequest, params: SamplingParams, model: str, answer_id: str,
    echoes: Sequence[str] = (), created: int | None = None, tokenizer: Tokenizer | None = None,
    reading: AnswerReading | None = None,
) -> AnswerForm | ResponseForm | MessageForm:  # fmt: skip
    """Return how the answer of ``asked``, which means ``chat``, looks."""
    created = int(time.time()) if created is None else created
    if isinstance(asked, MessagesRequest):
        return MessageForm(model, answer_id, reading or AnswerReading(), created)
    logprobs = logprob_form(tokenizer, params)
    if isinstance(asked, ResponsesRequest):
        return ResponseForm(asked, params, model, answer_id, reading or AnswerReading(), logprobs, created)
    return answer_form(chat, model, answer_id, tuple(echoes), created, reading, logprobs)
