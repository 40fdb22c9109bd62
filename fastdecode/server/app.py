"""The routes, and their guards: the API key, limits, and OpenAI's error shape for every failure."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from fastdecode import __version__
from fastdecode.core.errors import ConfigError, RequestError
from fastdecode.server.archive import LAST_EVENT_ID
from fastdecode.server.bodies import read_request
from fastdecode.server.errors import ApiError
from fastdecode.server.guards import HEALTH, HeadAsGet, KeyGuard, RequestIds
from fastdecode.server.live import add_live
from fastdecode.server.messages_errors import is_messages, message_error_response
from fastdecode.server.messages_routes import add_messages
from fastdecode.server.openapi import document, takes
from fastdecode.server.prometheus import CONTENT_TYPE
from fastdecode.server.protocol import (
    CHAT,
    COMPLETIONS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from fastdecode.server.responses_routes import add_responses
from fastdecode.server.service import Service
from fastdecode.server.streams import TextResponse, error_response, json_response


def make_app(service: Service) -> FastAPI:
    """Return the application over ``service``."""
    settings = service.settings
    shown: dict[str, Any] = {"openapi_url": None, "docs_url": None} if settings.disable_fastapi_docs else {}
    app = FastAPI(title="FastDecode", version=__version__, redoc_url=None, root_path=settings.root_path, **shown)
    app.add_middleware(HeadAsGet)
    app.add_middleware(KeyGuard, api_keys=settings.api_keys)
    if settings.enable_request_id_headers:
        app.add_middleware(RequestIds)
    for kind in (ApiError, RequestError, ConfigError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, _answer_error)
    _add_generation(app, service)
    add_responses(app, service)
    add_messages(app, service)
    _add_tokens(app, service)
    _add_models(app, service)
    add_live(app, service)
    _add_document(app, service)
    return app


def _add_document(app: FastAPI, service: Service) -> None:
    def openapi() -> dict[str, Any]:
        """Return the OpenAPI document. The first call makes it, since that takes a while."""
        app.openapi_schema = app.openapi_schema or document(app, service.model.names, service.model.vocab_size)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post(COMPLETIONS, openapi_extra=takes(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Answer a completion request: continue one prompt or several."""
        return await _generate(service, request, *await read_request(service, request, CompletionRequest))

    @app.post(CHAT, openapi_extra=takes(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        """Answer a chat request."""
        return await _generate(service, request, *await read_request(service, request, ChatRequest))

    @app.get(COMPLETIONS)
    async def rest_of_completions(request: Request) -> Response:
        """Return the rest of a completion's stream after the event that Last-Event-ID names."""
        return await _go_on(service, COMPLETIONS, request)

    @app.get(CHAT)
    async def rest_of_chat(request: Request) -> Response:
        """Return the rest of a chat's stream after the event that Last-Event-ID names."""
        return await _go_on(service, CHAT, request)


def _add_tokens(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", openapi_extra=takes(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """Return the token ids of a text or a conversation."""
        body, num_bytes = await read_request(service, request, TokenizeRequest)
        token_ids = await service.off_loop(num_bytes, service.model.tokenize, body)
        found = {"count": len(token_ids), "max_model_len": service.model.max_model_len, "tokens": token_ids}
        if body.return_token_strs:
            found["token_strs"] = await service.off_loop(num_bytes, service.model.token_texts, token_ids)
        return json_response(found)

    @app.post("/detokenize", openapi_extra=takes(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """Return the text of token ids."""
        body, num_bytes = await read_request(service, request, DetokenizeRequest)
        return json_response({"prompt": await service.off_loop(num_bytes, service.model.detokenize, body.tokens)})


def _add_models(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    async def models() -> Response:
        """Return the list of served models."""
        return json_response({"object": "list", "data": service.model.cards()})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """Return the card of the served model called ``name``."""
        service.model.check_name(name)
        return json_response(next(card for card in service.model.cards() if card["id"] == name))

    @app.get("/version")
    async def version() -> Response:
        """Return FastDecode's version."""
        return json_response({"version": __version__})

    @app.get("/metrics")
    async def metrics() -> Response:
        """Return metrics for Prometheus."""
        service.observer.metrics.num_tasks = len(asyncio.all_tasks())
        text = await service.off_loop(0, service.observer.metrics.text)
        return Response(text, media_type=CONTENT_TYPE)

    @app.get(HEALTH)
    async def health() -> Response:
        """Return 200 while requests are served; 503 without an engine or R-worker, or while the server is ending."""
        service.check_alive()
        if trouble := service.observer.state.trouble:
            raise ApiError(503, trouble, "server_error")
        return json_response({})


async def _generate(
    service: Service, request: Request, body: CompletionRequest | ChatRequest, num_bytes: int
) -> Response:
    if LAST_EVENT_ID in request.headers:
        return await _go_on(service, request.url.path, request)
    if body.stream_options and not body.stream:
        raise ApiError(400, "stream_options belong to a stream: set stream to true", param="stream_options")
    return TextResponse(service, await service.accept(body, num_bytes, request.headers))


async def _go_on(service: Service, route: str, request: Request) -> Response:
    """Return the rest of a stream after the event that the client has seen last."""
    if (last := request.headers.get(LAST_EVENT_ID)) is None:
        raise ApiError(400, "a GET resumes a stream: send Last-Event-ID, the id of the last event that you received")
    return TextResponse(service, *await service.archive.left_at(route, last))


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        error = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    elif isinstance(error, ClientDisconnect):
        error = ApiError(400, "the client is gone")
    elif not isinstance(error, ApiError | RequestError | ConfigError):
        error = ApiError(500, "the server made a mistake: see its log", "server_error")
    response = message_error_response(error) if is_messages(request.scope) else error_response(error)
    if response.status_code in (408, 413):
        response.headers["connection"] = "close"  # the unread rest of the body must not be taken for a request
    return response
