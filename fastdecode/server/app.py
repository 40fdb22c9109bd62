"""The routes, and what guards them: the API key, limits, and OpenAI's error shape for everything that goes wrong."""

from __future__ import annotations

import asyncio
import hmac
import logging
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from fastdecode import __version__
from fastdecode.api.text_limits import LONG_TEXT_BYTES
from fastdecode.core.errors import ConfigError, RequestError
from fastdecode.server.json_bounds import parse_json
from fastdecode.server.live import PAGE, add_live
from fastdecode.server.openapi import document, takes
from fastdecode.server.prometheus import CONTENT_TYPE
from fastdecode.server.protocol import (
    CHAT,
    COMPLETIONS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    StreamOptions,
    TokenizeRequest,
    read_body,
)
from fastdecode.server.responses_answer import ResponseForm
from fastdecode.server.responses_request import RESPONSES, ResponsesRequest, chat_of
from fastdecode.server.service import ApiError, Service
from fastdecode.server.streams import ResponsesResponse, TextResponse, error_response, json_response

logger = logging.getLogger(__name__)

HEALTH = "/health"

Body = TypeVar("Body", bound=msgspec.Struct)


def make_app(service: Service) -> FastAPI:
    """The application over ``service``."""
    app = FastAPI(title="FastDecode", version=__version__, redoc_url=None)
    app.add_middleware(KeyGuard, api_key=service.settings.api_key)
    for kind in (ApiError, RequestError, ConfigError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, _answer_error)
    _add_generation(app, service)
    _add_tokens(app, service)
    _add_models(app, service)
    add_live(app, service)
    _add_document(app, service)
    return app


def _add_document(app: FastAPI, service: Service) -> None:
    def openapi() -> dict[str, Any]:
        """Made once, since it takes a while."""
        app.openapi_schema = app.openapi_schema or document(app, service.model_names, service.vocab_size)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post(COMPLETIONS, openapi_extra=takes(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Go on with a text, or with several."""
        return await _generate(service, request, *await _read(service, request, CompletionRequest))

    @app.post(CHAT, openapi_extra=takes(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        return await _generate(service, request, *await _read(service, request, ChatRequest))

    @app.post(RESPONSES, openapi_extra=takes(ResponsesRequest))
    async def responses(request: Request) -> Response:
        """Answer a conversation, in the words of OpenAI's Responses API."""
        body, num_bytes = await _read(service, request, ResponsesRequest)
        exchange, form = await service.accept(chat_of(body), num_bytes, request.headers, may_be_shorter=True)
        asked = ResponseForm(body, exchange.params, form.model, form.answer_id, form.forced, form.offered)
        return ResponsesResponse(service, exchange, asked)


def _add_tokens(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", openapi_extra=takes(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """Token ids of a text, or of a conversation."""
        body, num_bytes = await _read(service, request, TokenizeRequest)
        token_ids = await service.off_loop(num_bytes, service.tokenize, body)
        found = {"count": len(token_ids), "max_model_len": service.max_model_len, "tokens": token_ids}
        if body.return_token_strs:
            found["token_strs"] = await service.off_loop(num_bytes, service.token_texts, token_ids)
        return json_response(found)

    @app.post("/detokenize", openapi_extra=takes(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        body, num_bytes = await _read(service, request, DetokenizeRequest)
        return json_response({"prompt": await service.off_loop(num_bytes, service.detokenize, body.tokens)})


def _add_models(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    async def models() -> Response:
        """What is served."""
        return json_response({"object": "list", "data": service.model_cards()})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """One of them."""
        service.check_model(name)
        return json_response(next(card for card in service.model_cards() if card["id"] == name))

    @app.get("/version")
    async def version() -> Response:
        """FastDecode's."""
        return json_response({"version": __version__})

    @app.get("/metrics")
    async def metrics() -> Response:
        """For Prometheus."""
        service.observer.metrics.num_tasks = len(asyncio.all_tasks())
        text = await service.off_loop(0, service.observer.metrics.text)
        return Response(text, media_type=CONTENT_TYPE)

    @app.get(HEALTH)
    async def health() -> Response:
        """200 while requests are served; 503 once the engine is dead, the server ends, or no R-worker is there."""
        service.check_alive()
        if trouble := service.observer.state.trouble:
            raise ApiError(503, trouble, "server_error")
        return json_response({})


async def _generate(
    service: Service, request: Request, body: CompletionRequest | ChatRequest, num_bytes: int
) -> Response:
    options = (body.stream_options or StreamOptions()) if body.stream else None
    if body.stream_options and not body.stream:
        raise ApiError(400, "stream_options belong to a stream: set stream to true", param="stream_options")
    exchange, form = await service.accept(body, num_bytes, request.headers)
    return TextResponse(service, exchange, form, options)


async def _read(service: Service, request: Request, kind: type[Body]) -> tuple[Body, int]:
    """The body as ``kind``, and its length; ApiError or RequestError where it is too long, too slow, or not that."""
    try:
        data = await _receive(service, request)
        is_long = len(data) > LONG_TEXT_BYTES
        body, unknown = await service.off_loop(len(data), _parse, data, kind) if is_long else _parse(data, kind)
    finally:
        service.trim_when_idle()
    if unknown:
        logger.warning("%s: fields that are not understood are ignored: %.500s", request.url.path, ascii(unknown))
    return body, len(data)


def _parse(data: bytearray, kind: type[Body]) -> tuple[Body, list[str]]:
    return read_body(parse_json(data), kind)


async def _receive(service: Service, request: Request) -> bytearray:
    most, seconds = service.settings.max_request_bytes, service.settings.request_timeout
    too_long = ApiError(413, f"the body is longer than {most} bytes")
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > most:
        raise too_long
    try:
        return await asyncio.wait_for(_join(request, most, too_long), seconds)
    except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
        raise ApiError(408, f"the body did not arrive within {seconds:g} seconds") from None


async def _join(request: Request, most: int, too_long: ApiError) -> bytearray:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise too_long
    return body  # no copy, for which all streams would wait


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        error = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    elif isinstance(error, ClientDisconnect):
        error = ApiError(400, "the client is gone")
    elif not isinstance(error, ApiError | RequestError | ConfigError):
        error = ApiError(500, "the server made a mistake: see its log", "server_error")
    response = error_response(error)
    if response.status_code in (408, 413):
        response.headers["connection"] = "close"  # the rest of the body is not read
    return response


class KeyGuard:
    """Answers 401 to what does not bring the API key, but for the health check and the live page, which is empty until
    its stream, which needs the key, fills it."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app = app
        self._expected = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._expected is not None and scope["path"] not in (HEALTH, PAGE):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                refusal = ApiError(401, "the API key is missing or wrong: send it as `Authorization: Bearer KEY`")
                await error_response(refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)
