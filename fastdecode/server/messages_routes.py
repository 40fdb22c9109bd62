"""The routes of Anthropic's Messages API, with errors in Anthropic's shape."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, cast

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from fastdecode.api.outputs import RequestOutput
from fastdecode.server.api_request import ApiRequest
from fastdecode.server.bodies import read_request
from fastdecode.server.messages_answer import GrowingMessage, MessageForm, whole_message
from fastdecode.server.messages_errors import message_error, message_error_response
from fastdecode.server.messages_request import (
    COUNT_TOKENS,
    MESSAGES,
    CountTokensRequest,
    MessagesRequest,
    chat_of_messages,
)
from fastdecode.server.openapi import takes
from fastdecode.server.service import Service, check_finished
from fastdecode.server.streams import GenerationResponse, json_response


def add_messages(app: FastAPI, service: Service) -> None:
    """Add the routes of the Messages API to ``app``."""

    @app.post(MESSAGES, openapi_extra=takes(MessagesRequest))
    async def messages(request: Request) -> Response:
        """Answer a conversation in the form of Anthropic's Messages API."""
        body, num_bytes = await read_request(service, request, MessagesRequest)
        found = await service.accept(body, num_bytes, request.headers)
        return MessageResponse(service, found, bool(body.stream))

    @app.post(COUNT_TOKENS, openapi_extra=takes(CountTokensRequest))
    async def count_tokens(request: Request) -> Response:
        """Count the tokens of a conversation."""
        body, num_bytes = await read_request(service, request, CountTokensRequest)
        service.model.check_name(body.model)
        count = await service.off_loop(num_bytes, service.model.reader.count, chat_of_messages(body))
        return json_response({"input_tokens": count})


class MessageResponse(GenerationResponse):
    """Sends an answer of the Messages API. Its stream events have types and no ids."""

    def __init__(self, service: Service, request: ApiRequest, stream: bool) -> None:
        self._form = cast(MessageForm, request.form)
        super().__init__(service, request, stream)

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        return whole_message(self._form, outputs[0])

    async def events(self) -> AsyncIterator[bytes]:
        exchange, growing = self._request.exchange, GrowingMessage(self._form)
        news = await self._reading.news()
        yield _joined(growing.begin(len(exchange.prompts[0].token_ids)))
        while True:
            for output in news.values():
                if output.outputs[0].finish_reason != "error" and (found := _joined(growing.grow(output.outputs[0]))):
                    yield found
            if exchange.finished:
                break
            news = await self._reading.news()
        yield _joined(growing.end(check_finished(exchange.outputs)[0]))

    def refusal(self, error: Exception) -> Response:
        return message_error_response(error, self._request.answer_id)

    def failure(self, status: int, body: dict[str, Any]) -> bytes:
        return _joined([message_error(status, body["error"]["message"], self._request.answer_id)])


def _joined(events: Iterable[dict[str, Any]]) -> bytes:
    """Return ``events`` as the bytes of server-sent events."""
    return b"".join(
        b"event: " + event["type"].encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n" for event in events
    )
