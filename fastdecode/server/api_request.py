"""One API request, running or ended: its body, the form of its answer, and its exchange with the engine."""

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
from fastdecode.server.sources import SourceForm

Asked = CompletionRequest | ChatRequest | ResponsesRequest | MessagesRequest

KINDS: dict[str, type[Asked]] = {
    COMPLETIONS: CompletionRequest, CHAT: ChatRequest, RESPONSES: ResponsesRequest, MESSAGES: MessagesRequest
}  # fmt: skip

ID_PREFIXES = {COMPLETIONS: "cmpl-", CHAT: "chatcmpl-", RESPONSES: "resp_", MESSAGES: "msg_"}
"""Prefixes of answer ids, by route."""


@dataclass(eq=False)
class ApiRequest:
    """One API request.

    ``messages``: the conversation of a Responses request, without instructions; a later request may continue it.
    """

    asked: Asked
    exchange: Exchange
    form: AnswerForm | ResponseForm | MessageForm
    messages: list[dict[str, Any]] = field(default_factory=list)

    @property
    def answer_id(self) -> str:
        """The answer's id, which is the id of the request's exchange."""
        return self.exchange.exchange_id

    @property
    def route(self) -> str:
        """The HTTP route on which the request arrived."""
        return next(route for route, kind in KINDS.items() if type(self.asked) is kind)

    @property
    def in_background(self) -> bool:
        """True if the request asks to run without a connected client."""
        return isinstance(self.asked, ResponsesRequest) and bool(self.asked.background)

    @property
    def is_stored(self) -> bool:
        """True if clients can request the answer later by its id."""
        return isinstance(self.asked, ResponsesRequest) and self.asked.is_stored

    def kept(self) -> KeptRequest:
        """Return the record that the store keeps of this request while it runs."""
        prompts = [(each.token_ids, each.text) for each in self.exchange.prompts]
        body = msgspec.to_builtins(self.asked)
        return KeptRequest(self.answer_id, self.route, body, self.form.created, prompts, self.messages)


def chat_meant(asked: Asked, messages: list[dict[str, Any]]) -> ChatRequest | CompletionRequest:
    """Return ``asked`` as a chat or completion request. ``messages``: a Responses request's conversation."""
    if isinstance(asked, ResponsesRequest):
        return chat_of(asked, messages)
    return chat_of_messages(asked) if isinstance(asked, MessagesRequest) else asked


def form_of(
    asked: Asked, chat: ChatRequest | CompletionRequest, params: SamplingParams, model: str, answer_id: str,
    echoes: Sequence[str] = (), created: int | None = None, tokenizer: Tokenizer | None = None,
    reading: AnswerReading | None = None, sources: SourceForm | None = None,
) -> AnswerForm | ResponseForm | MessageForm:  # fmt: skip
    """Return how to write the answer to ``asked``. ``chat``: the result of ``chat_meant`` for ``asked``."""
    created = int(time.time()) if created is None else created
    if isinstance(asked, MessagesRequest):
        return MessageForm(model, answer_id, reading or AnswerReading(), created, sources or SourceForm())
    logprobs = logprob_form(tokenizer, params)
    if isinstance(asked, ResponsesRequest):
        read, told = reading or AnswerReading(), sources or SourceForm()
        return ResponseForm(asked, params, model, answer_id, read, logprobs, created, told)
    return answer_form(chat, model, answer_id, tuple(echoes), created, reading, logprobs, sources)
