"""Answers to OpenAI clients as plain data: whole answers, chunks of streams, and errors."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fastdecode.api.outputs import CompletionOutput, RequestOutput
from fastdecode.api.sampling_params import NO_TOKEN
from fastdecode.api.structured_outputs import UNFOLLOWED
from fastdecode.server.answer_reader import AnswerReading
from fastdecode.server.chat_messages import ChatWriter
from fastdecode.server.logprobs import Chosen, LogprobForm, TextOffsets, chosen, prompt_chosen
from fastdecode.server.protocol import ChatRequest, CompletionRequest
from fastdecode.server.sources import SourceForm

INVALID = "invalid_request_error"


@dataclass(frozen=True)
class AnswerForm:
    """The form of the answers to one request, for a chat or a completion.

    ``return_token_ids``: include token ids. ``echoes``: the prompts' texts, if the request asks to repeat each prompt
    before its completion. ``only_echoes``: the request asks for no new tokens. ``reading``: how to split a chat's text.
    ``tells_thoughts``: include reasoning in a chat's message.
    """

    chat: bool
    model: str
    answer_id: str
    return_token_ids: bool = False
    echoes: tuple[str, ...] = ()
    reading: AnswerReading = field(default_factory=AnswerReading)
    tells_thoughts: bool = True
    logprobs: LogprobForm = field(default_factory=LogprobForm)
    created: int = field(default_factory=lambda: int(time.time()))
    only_echoes: bool = False
    sources: SourceForm = field(default_factory=SourceForm)

    @property
    def id(self) -> str:
        """The answer's id with OpenAI's prefix: "chatcmpl-" or "cmpl-"."""
        return f"{'chatcmpl' if self.chat else 'cmpl'}-{self.answer_id}"

    def shown(self, output: RequestOutput) -> RequestOutput:
        """Return ``output`` as clients see it: without the one generated token if they requested only the prompt."""
        return replace(output, outputs=[each.cut() for each in output.outputs]) if self.only_echoes else output

    def finish_reason(self, reason: str | None, has_called: bool) -> str | None:
        """Translate the engine's finish ``reason`` to OpenAI's. ``has_called``: the answer has tool calls."""
        if self.reading.forced:
            return self.reading.forced.finish_reason(reason)
        return "tool_calls" if has_called and reason == "stop" else reason


def answer_form(
    request: CompletionRequest | ChatRequest,
    model: str,
    answer_id: str,
    echoes: tuple[str, ...] = (),
    created: int | None = None,
    reading: AnswerReading | None = None,
    logprobs: LogprobForm | None = None,
    sources: SourceForm | None = None,
) -> AnswerForm:
    """Return the form of the answer to ``request``.

    ``model``: the model name to show. ``created``: Unix seconds; None for the present time.
    """
    created = int(time.time()) if created is None else created
    chat, token_ids = isinstance(request, ChatRequest), bool(request.return_token_ids)
    thoughts = not isinstance(request, ChatRequest) or request.include_reasoning is not False
    told = logprobs or LogprobForm(
        (request.top_logprobs if isinstance(request, ChatRequest) else request.logprobs) or 0
    )
    reading = reading or AnswerReading()
    only = isinstance(request, CompletionRequest) and bool(request.echo) and request.max_tokens == 0
    return AnswerForm(
        chat, model, answer_id, token_ids, echoes, reading, thoughts, told, created, only, sources or SourceForm()
    )


def new_id() -> str:
    """Return a random unique id for an answer, 32 hexadecimal digits."""
    return uuid.uuid4().hex


def error_body(message: str, kind: str = INVALID, code: int | str = 400, param: str | None = None) -> dict[str, Any]:
    """Return the body of an error answer in OpenAI's shape."""
    return {"error": {"message": " ".join(message.split()), "type": kind, "param": param, "code": code}}


def is_refusal(reason: str) -> bool:
    """Return whether ``reason``, of a failed request, says that the request's constraints allowed no further token."""
    return reason.startswith((UNFOLLOWED, NO_TOKEN))


def usage_of(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Return OpenAI's ``usage`` object: the token counts of all prompts and completions in ``outputs``."""
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_new = sum(len(each.tokens) for output in outputs for each in output.outputs)
    cached = sum(output.num_cached_tokens or 0 for output in outputs)
    counts = {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}
    return {**counts, "prompt_tokens_details": {"cached_tokens": cached}}


def whole_answer(form: AnswerForm, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Return the body of a finished request's answer. ``outputs``: the final output of each prompt, in order."""
    choices: list[dict[str, Any]] = []
    outputs = [form.shown(output) for output in outputs]
    for number, output in enumerate(outputs):
        prompt = prompt_chosen(output) if form.echoes else []
        for each in output.outputs:
            choice = _whole_choice(form, each, form.echoes[number] if form.echoes else "", prompt)
            choice |= form.sources.beside(each, choice=len(choices))
            if form.return_token_ids:
                choice |= {"token_ids": list(each.token_ids), "prompt_token_ids": output.prompt_token_ids}
            choices.append({"index": len(choices), **choice})
    return {
        "id": form.id,
        "object": "chat.completion" if form.chat else "text_completion",
        "created": form.created,
        "model": form.model,
        "choices": choices,
        "usage": usage_of(outputs),
    }


def chunk(form: AnswerForm, choices: list[dict[str, Any]], counts: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the data of one stream event with these ``choices``, and ``counts`` as its usage."""
    found: dict[str, Any] = {
        "id": form.id,
        "object": "chat.completion.chunk" if form.chat else "text_completion",
        "created": form.created,
        "model": form.model,
        "choices": choices,
    }
    return found if counts is None else {**found, "usage": counts}


def first_choice(form: AnswerForm, index: int, output: RequestOutput, growing: GrowingChoice) -> dict[str, Any] | None:
    """Return the beginning of a choice's stream, before any token: a chat's role, or the echoed prompt.

    ``growing`` then returns the chunks after this one. Return None if the choice needs no first chunk.
    """
    if form.chat:
        delta = {"role": "assistant", "content": None if form.reading.forced else ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
    if not form.echoes:
        return None
    echo = form.echoes[index // len(output.outputs)]
    return {"index": index, "text": echo, "logprobs": growing.logprobs_of_prompt(output), "finish_reason": None}


class GrowingChoice:
    """One choice of a stream: remembers what was sent, and returns what is new in its completion.

    ``begun``: the first chunk was sent. ``num_tokens``: completion tokens sent. ``finished``: the last chunk was sent.
    """

    def __init__(self, form: AnswerForm, index: int) -> None:
        self._form, self._index = form, index
        self._num_shown, self._num_known = 0, 0
        self._offsets = TextOffsets()
        answer = f"{form.answer_id}/{index}"
        self._writer = ChatWriter(form.reading, answer, form.tells_thoughts) if form.chat else None
        self.begun, self.num_tokens, self.finished = False, 0, False

    def go_on(self, num_tokens: int, finished: bool) -> None:
        """Resume a stream whose client has ``num_tokens`` tokens already, and also the last chunk if ``finished``."""
        self.begun, self.finished = True, finished
        self.num_tokens = self._num_known = num_tokens

    def logprobs_of_prompt(self, output: RequestOutput) -> dict[str, Any] | None:
        """Return the log-probabilities of the echoed prompt's tokens; None if they are not requested."""
        if output.prompt_logprobs is None:
            return None
        return self._form.logprobs.of_completion(prompt_chosen(output), self._offsets)

    def news(self, completion: CompletionOutput) -> dict[str, Any] | None:
        """Return the choice object of the next chunk; None if ``completion`` has nothing new."""
        if self.finished:
            return None
        if known := self._num_known:
            if len(completion.tokens) < known and completion.finish_reason is None:
                return None
            self.num_tokens = self._num_known = 0
            self._choice(completion.after(min(known, len(completion.tokens))))
        return self._choice(completion)

    def _choice(self, completion: CompletionOutput) -> dict[str, Any] | None:
        if len(completion.tokens) == self.num_tokens and completion.finish_reason is None:
            return None
        text = self._new_text(completion)
        if text is None:
            return None
        choice: dict[str, Any] = {
            "index": self._index,
            **text,
            "logprobs": self._logprobs(completion),
            "finish_reason": self._form.finish_reason(
                completion.finish_reason, bool(self._writer and self._writer.has_called)
            ),
        }
        if completion.stop_reason is not None:
            choice["stop_reason"] = completion.stop_reason
        choice |= self._form.sources.beside(completion, self.num_tokens, self._index)
        if self._form.return_token_ids:
            choice["token_ids"] = list(completion.tokens[self.num_tokens :])
        self._num_shown = len(completion.text)
        self.num_tokens = len(completion.tokens)
        self.finished = completion.finish_reason is not None
        return choice

    def _new_text(self, completion: CompletionOutput) -> dict[str, Any] | None:
        """Return the fields with the new text or a chat's delta; None if the new text is still incomplete."""
        if self._writer is None:
            return {"text": completion.text[self._num_shown :]}
        delta = self._writer.delta(completion.text, completion.finish_reason is not None)
        return None if delta is None else {"delta": delta}

    def _logprobs(self, completion: CompletionOutput) -> dict[str, Any] | None:
        if completion.all_logprobs is None:
            return None
        told = self._form.logprobs
        if self._form.chat:
            return {"content": told.of_chat(completion, self.num_tokens)}
        return told.of_completion(chosen(completion, self.num_tokens), self._offsets)


def _whole_choice(form: AnswerForm, completion: CompletionOutput, echo: str, prompt: Chosen) -> dict[str, Any]:
    """Return a finished completion's choice object. ``prompt``: prompt tokens with log-probabilities, if requested."""
    told = None
    if completion.logprobs is not None:
        logprobs = form.logprobs
        told = (
            {"content": logprobs.of_chat(completion)}
            if form.chat
            else logprobs.of_completion([*prompt, *chosen(completion)], TextOffsets())
        )
    said = {"message": _message(form, completion)} if form.chat else {"text": echo + completion.text}
    has_called = form.chat and "tool_calls" in said["message"]
    return {
        **said,
        "logprobs": told,
        "finish_reason": form.finish_reason(completion.finish_reason, has_called),
        "stop_reason": completion.stop_reason,
    }


def _message(form: AnswerForm, completion: CompletionOutput) -> dict[str, Any]:
    answer = f"{form.answer_id}/{completion.index}"
    return ChatWriter(form.reading, answer, form.tells_thoughts).message(completion.text)
