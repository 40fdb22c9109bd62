"""Answers on their way to the client, whole or as server-sent events; a client that is gone ends its request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fastdecode.api.outputs import RequestOutput
from fastdecode.core.errors import FastDecodeError
from fastdecode.server.answers import AnswerForm, GrowingChoice, chunk, error_body, first_choice, usage_of, whole_answer
from fastdecode.server.exchanges import DisconnectedError, Exchange
from fastdecode.server.protocol import StreamOptions
from fastdecode.server.responses_answer import GrowingResponse, ResponseForm, whole_response
from fastdecode.server.service import ApiError, Service, check_finished

SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class GenerationResponse(Response):
    """Answers ``exchange``, whole or as a stream; subclasses know the words. ``last``: what ends every stream."""

    last = b""

    def __init__(self, service: Service, exchange: Exchange, stream: bool) -> None:
        super().__init__()
        self._service, self._exchange, self._streams = service, exchange, stream

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer of the finished exchange."""
        raise NotImplementedError

    def events(self) -> AsyncIterator[bytes]:
        """Server-sent events, the first one as soon as the engine has taken the exchange."""
        raise NotImplementedError

    def failure(self, status: int, body: dict[str, Any]) -> bytes:
        """The event of a stream that has begun and fails; ``body`` is in OpenAI's error shape."""
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.create_task(self._watch(receive))
        try:
            if self._streams:
                await self._stream(send)
            else:
                await (await self._whole())(scope, receive, send)
        except DisconnectedError:
            pass
        finally:
            watch.cancel()
            self._service.end(self._exchange)

    async def _watch(self, receive: Receive) -> None:
        """Fail the exchange as soon as its client is gone."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._exchange.fail(DisconnectedError("the client is gone"))
        self._service.end(self._exchange)

    async def _whole(self) -> Response:
        exchange = self._exchange
        try:
            while not exchange.finished:
                await exchange.news()
            return json_response(self.whole(check_finished(exchange.outputs)))
        except (ApiError, FastDecodeError) as error:
            if isinstance(error, DisconnectedError):
                raise
            return error_response(error)

    async def _stream(self, send: Send) -> None:
        """The status is sent with the first event, so that a request which cannot run is answered with its own."""
        started = False
        try:
            async for event in self.events():
                if not started:
                    await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
                    started = True
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except (ApiError, FastDecodeError) as error:
            if isinstance(error, DisconnectedError):
                raise
            if not started:
                response = error_response(error)
                await response({"type": "http"}, _nothing, send)
                return
            await send({"type": "http.response.body", "body": self.failure(*error_answer(error)), "more_body": True})
        await send({"type": "http.response.body", "body": self.last, "more_body": False})


class TextResponse(GenerationResponse):
    """A completion's or a chat's answer; a stream has ``options``."""

    last = b"data: [DONE]\n\n"

    def __init__(self, service: Service, exchange: Exchange, form: AnswerForm, options: StreamOptions | None) -> None:
        super().__init__(service, exchange, options is not None)
        self._form, self._options = form, options or StreamOptions()

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        return whole_answer(self._form, outputs)

    def events(self) -> AsyncIterator[bytes]:
        return _events(self._exchange, self._form, self._options)

    def failure(self, status: int, body: dict[str, Any]) -> bytes:
        return _event(body)


class ResponsesResponse(GenerationResponse):
    """An answer of the Responses API, whose events have types."""

    def __init__(self, service: Service, exchange: Exchange, form: ResponseForm) -> None:
        super().__init__(service, exchange, bool(form.request.stream))
        self._form, self._growing = form, GrowingResponse(form)

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        return whole_response(self._form, outputs[0])

    async def events(self) -> AsyncIterator[bytes]:
        exchange, growing = self._exchange, self._growing
        news = await exchange.news()
        yield _typed_events(growing.begin())
        while True:
            for output in news.values():
                if output.outputs[0].finish_reason != "error":
                    yield _typed_events(growing.grow(output.outputs[0]))
            if exchange.finished:
                break
            news = await exchange.news()
        yield _typed_events(growing.end(check_finished(exchange.outputs)[0]))

    def failure(self, status: int, body: dict[str, Any]) -> bytes:
        return _typed_events([self._growing.error(body["error"]["message"], str(body["error"]["code"]))])


async def _events(exchange: Exchange, form: AnswerForm, options: StreamOptions) -> AsyncIterator[bytes]:
    """A chunk for whatever came at once, beginning with each choice's first one."""
    count = exchange.params.n
    choices = [GrowingChoice(form, index) for index in range(len(exchange.prompts) * count)]
    news = await exchange.news()
    for index, _ in enumerate(choices):
        first = first_choice(form, index, form.echoes[index // count] if form.echoes else "")
        if first:
            yield _event(chunk(form, [first]))
    while True:
        found = [choice for index, output in news.items() for choice in _new_choices(choices, index * count, output)]
        if found:
            counts = usage_of([each for each in exchange.outputs if each]) if options.continuous_usage_stats else None
            yield b"".join(_event(chunk(form, [choice], counts)) for choice in found)
        if exchange.finished:
            break
        news = await exchange.news()
    outputs = check_finished(exchange.outputs)
    if options.include_usage:
        yield _event(chunk(form, [], usage_of(outputs)))


def _new_choices(choices: list[GrowingChoice], first: int, output: RequestOutput) -> list[dict[str, Any]]:
    found = (choices[first + each.index].news(each) for each in output.outputs if each.finish_reason != "error")
    return [choice for choice in found if choice]


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """``content`` as JSON."""
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def error_answer(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body of an answer in OpenAI's error shape."""
    if isinstance(error, ApiError):
        return error.status, error_body(str(error), error.kind, error.status, error.param)
    if isinstance(error, ValueError):  # RequestError, ConfigError
        return 400, error_body(str(error))
    return 503, error_body(str(error), "server_error", 503)


def error_response(error: Exception) -> Response:
    """The same as a response."""
    status, body = error_answer(error)
    return json_response(body, status, error.headers if isinstance(error, ApiError) else None)


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def _typed_events(events: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(b"event: " + event["type"].encode() + b"\n" + _event(event) for event in events)


async def _nothing() -> dict[str, Any]:
    return {"type": "http.disconnect"}
