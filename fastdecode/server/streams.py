"""Sends answers to clients, whole or as server-sent events. A client that leaves ends its request."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any, cast

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fastdecode.api.outputs import RequestOutput
from fastdecode.core.errors import FastDecodeError, RequestError
from fastdecode.server.answers import AnswerForm, GrowingChoice, chunk, error_body, first_choice, usage_of, whole_answer
from fastdecode.server.api_request import ApiRequest
from fastdecode.server.archive import REQUEST_ID
from fastdecode.server.errors import ApiError, api_error
from fastdecode.server.exchanges import DisconnectedError, EngineDeadError, ShutdownError
from fastdecode.server.protocol import GenerationRequest, StreamOptions
from fastdecode.server.responses_answer import GrowingResponse, ResponseForm, whole_response
from fastdecode.server.service import Service, check_finished

SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class GenerationResponse(Response):
    """Sends the answer to ``request``, whole or as a stream, in a subclass's form. ``last``: a stream's last bytes."""

    last = b""

    def __init__(self, service: Service, request: ApiRequest, stream: bool) -> None:
        """``request`` is passed to ``Service.leave`` when the client is done."""
        super().__init__()
        self._service, self._request, self._streams = service, request, stream
        self._reading = request.exchange.read()
        self._names = [(REQUEST_ID.encode(), request.answer_id.encode())]
        self._is_kept = service.keeper is not None

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the body of the answer. ``outputs``: the final outputs of the finished exchange."""
        raise NotImplementedError

    def events(self) -> AsyncIterator[bytes]:
        """Yield server-sent events, the first as soon as the engine has accepted the exchange."""
        raise NotImplementedError

    def failure(self, status: int, body: dict[str, Any]) -> bytes:
        """Return the event that ends a failed stream, as bytes. ``body``: the error in OpenAI's shape."""
        raise NotImplementedError

    def refusal(self, error: Exception) -> Response:
        """Return the HTTP response for ``error``, for use before anything was sent."""
        return error_response(error)

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
            self._service.leave(self._request, self._reading)

    async def _watch(self, receive: Receive) -> None:
        """Wait until the client disconnects, then fail its reading of the exchange."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._reading.fail(DisconnectedError("the client is gone"))
        self._service.leave(self._request, self._reading)

    async def _whole(self) -> Response:
        exchange = self._request.exchange
        try:
            while not exchange.finished:
                await self._reading.news()
            answer = self.whole(check_finished(exchange.outputs))
            return json_response(answer, headers={REQUEST_ID: self._request.answer_id})
        except (ApiError, FastDecodeError) as error:
            if isinstance(error, DisconnectedError):
                raise
            return self.refusal(error)

    async def _stream(self, send: Send) -> None:
        """Send the stream. The status goes with the first event, so that a refused request gets its own status."""
        begin = {"type": "http.response.start", "status": 200, "headers": SSE_HEADERS + self._names}
        started = False
        try:
            async for event in self.events():
                if not started:
                    await send(begin)
                    started = True
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except (ApiError, FastDecodeError) as error:
            if isinstance(error, DisconnectedError):
                raise
            if not started:
                response = self.refusal(error)
                await response({"type": "http"}, _nothing, send)
                return
            if self._is_kept and isinstance(error, ShutdownError | EngineDeadError):
                return  # return without an end: that breaks the connection, and the next server continues the stream
            await send({"type": "http.response.body", "body": self.failure(*error_answer(error)), "more_body": True})
        if not started:
            await send(begin)
        await send({"type": "http.response.body", "body": self.last, "more_body": False})


class TextResponse(GenerationResponse):
    """Sends a completion's or chat's answer. ``after``: the ``TextStreamPlace.name`` after which a stream continues."""

    last = b"data: [DONE]\n\n"

    def __init__(self, service: Service, request: ApiRequest, after: str | None = None) -> None:
        """Raise RequestError if ``after`` names no place in this request's stream."""
        asked = cast(GenerationRequest, request.asked)
        self._form = cast(AnswerForm, request.form)
        self._options = asked.stream_options or StreamOptions()
        self._place = TextStreamPlace(self._form, request.exchange.num_sequences, after)
        super().__init__(service, request, after is not None or bool(asked.stream))

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        return whole_answer(self._form, outputs)

    async def events(self) -> AsyncIterator[bytes]:
        """Yield a chunk per choice for each batch of new tokens, after each choice's first chunk."""
        form, exchange, place = self._form, self._request.exchange, self._place
        count = exchange.params.n
        news = await self._reading.news()
        if form.echoes:
            while not all(exchange.outputs):  # wait until every prompt has an output
                news |= await self._reading.news()
        for index, choice in enumerate(place.choices):
            output = exchange.outputs[index // count] or next(iter(news.values()))
            first = None if choice.begun else first_choice(form, index, output, choice)
            choice.begun = True
            if first:
                yield self._event(chunk(form, [first]))
        while True:
            found = [event for index, output in news.items() for event in self._new_events(index * count, output)]
            if found:
                yield b"".join(found)
            if exchange.finished:
                break
            news = await self._reading.news()
        outputs = check_finished(exchange.outputs)
        if self._options.include_usage and not place.told_usage:
            place.told_usage = True
            yield self._event(chunk(form, [], usage_of([self._form.shown(each) for each in outputs])))

    def failure(self, status: int, body: dict[str, Any]) -> bytes:
        return _event(body)

    def _new_events(self, first: int, output: RequestOutput) -> Iterator[bytes]:
        outputs = self._request.exchange.outputs
        output = self._form.shown(output)
        for each in output.outputs:
            choice = None if each.finish_reason == "error" else self._place.choices[first + each.index].news(each)
            if choice:
                counts = (
                    usage_of([self._form.shown(found) for found in outputs if found])
                    if self._options.continuous_usage_stats
                    else None
                )
                yield self._event(chunk(self._form, [choice], counts))

    def _event(self, content: dict[str, Any]) -> bytes:
        return _event(content, f"{self._form.id}:{self._place.name}" if self._is_kept else None)


class TextStreamPlace:
    """A place in a stream: what a client has of each choice. Its ``name`` is the event id that Last-Event-ID repeats.

    The name is "all" after the token counts. Before, it lists for each choice, separated by commas, the number of
    tokens sent, with a "." once the choice has ended; "-" before the choice's first chunk.
    """

    def __init__(self, form: AnswerForm, num_choices: int, name: str | None = None) -> None:
        """Raise RequestError if ``name`` is no valid place in a stream of ``num_choices`` choices."""
        self.choices = [GrowingChoice(form, index) for index in range(num_choices)]
        self.told_usage = name == "all"
        states = [] if name is None else ["0."] * num_choices if self.told_usage else name.split(",")
        if name is not None and (len(states) != num_choices or not all(map(_STATE.fullmatch, states))):
            raise RequestError(f"Last-Event-ID: {name!r:.200} is no place in a stream of {num_choices} choices")
        for choice, state in zip(self.choices, states, strict=False):
            if state != "-":
                choice.go_on(int(state.rstrip(".")), state.endswith("."))

    @property
    def name(self) -> str:
        """The name of this place, as an event id."""
        if self.told_usage:
            return "all"
        return ",".join(f"{each.num_tokens}{'.' * each.finished}" if each.begun else "-" for each in self.choices)


_STATE = re.compile(r"-|[0-9]{1,9}\.?")


class ResponsesResponse(GenerationResponse):
    """Sends an answer of the Responses API as typed events. ``after``: number of the last event that the client has."""

    def __init__(self, service: Service, request: ApiRequest, stream: bool, after: int = -1) -> None:
        self._form = cast(ResponseForm, request.form)
        self._growing, self._after = GrowingResponse(self._form), after
        super().__init__(service, request, stream)

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        return whole_response(self._form, outputs[0])

    async def events(self) -> AsyncIterator[bytes]:
        exchange, growing = self._request.exchange, self._growing
        news = await self._reading.news()
        yield self._new(growing.begin())
        while True:
            for output in news.values():
                if output.outputs[0].finish_reason != "error":
                    yield self._new(growing.grow(output.outputs[0]))
            if exchange.finished:
                break
            news = await self._reading.news()
        yield self._new(growing.end(check_finished(exchange.outputs)[0]))

    def failure(self, status: int, body: dict[str, Any]) -> bytes:
        return self._new([self._growing.error(body["error"]["message"], str(body["error"]["code"]))])

    def _new(self, events: Iterable[dict[str, Any]]) -> bytes:
        """Return, as bytes, those of ``events`` that the client does not have yet."""
        new = (event for event in events if event["sequence_number"] > self._after)
        return b"".join(
            _event(event, f"{self._form.id}:{event['sequence_number']}" if self._is_kept else None, event["type"])
            for event in new
        )


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return an HTTP response with ``content`` as its JSON body."""
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def error_answer(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status, and the body in OpenAI's error shape, that tell ``error`` to a client."""
    found = api_error(error)
    return found.status, error_body(str(found), found.kind, found.status, found.param)


def error_response(error: Exception) -> Response:
    """Return the HTTP response that tells ``error`` to a client, in OpenAI's error shape."""
    status, body = error_answer(error)
    return json_response(body, status, error.headers if isinstance(error, ApiError) else None)


def _event(content: dict[str, Any], event_id: str | None = None, kind: str | None = None) -> bytes:
    """Return one server-sent event as bytes. ``content``: its data; ``kind``: its event type, if any."""
    head = f"id: {event_id}\n" if event_id else ""
    head += f"event: {kind}\n" if kind else ""
    return head.encode() + b"data: " + msgspec.json.encode(content) + b"\n\n"


async def _nothing() -> dict[str, Any]:
    return {"type": "http.disconnect"}
