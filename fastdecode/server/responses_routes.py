"""The routes of the Responses API: create a response; read, cancel or delete a stored one."""

from __future__ import annotations

from typing import Any, cast

from fastapi import FastAPI, Request
from starlette.responses import Response

from fastdecode.core.errors import RequestError
from fastdecode.server.api_request import ApiRequest
from fastdecode.server.archive import LAST_EVENT_ID
from fastdecode.server.bodies import read_request
from fastdecode.server.errors import ApiError, api_error
from fastdecode.server.keeper import CANCELLED
from fastdecode.server.openapi import takes
from fastdecode.server.responses_answer import ResponseForm, whole_response
from fastdecode.server.responses_request import RESPONSES, ResponsesRequest
from fastdecode.server.service import Service, check_finished
from fastdecode.server.streams import ResponsesResponse, json_response


def add_responses(app: FastAPI, service: Service) -> None:
    """Add the routes of the Responses API to ``app``."""

    @app.post(RESPONSES, openapi_extra=takes(ResponsesRequest))
    async def responses(request: Request) -> Response:
        """Answer a conversation in the form of OpenAI's Responses API."""
        body, num_bytes = await read_request(service, request, ResponsesRequest)
        if last := request.headers.get(LAST_EVENT_ID):
            return await _go_on(service, last)
        found = await service.accept(body, num_bytes, request.headers)
        if found.in_background and not body.stream:
            return json_response(response_of(found))
        return ResponsesResponse(service, found, bool(body.stream))

    @app.get(RESPONSES)
    async def rest(request: Request) -> Response:
        """Return the rest of a stream after the event that the Last-Event-ID header names."""
        last = request.headers.get(LAST_EVENT_ID)
        if last is None:
            raise ApiError(400, "a GET resumes a stream: send Last-Event-ID, or ask for a response by its id")
        return await _go_on(service, last)

    @app.get(RESPONSES + "/{response_id}")
    async def response(request: Request, response_id: str) -> Response:
        """Return a stored response; with ?stream=true its events after the event number ?starting_after."""
        found = await service.archive.response(response_id)
        asked = request.query_params
        if asked.get("stream", "false").lower() in ("true", "1"):
            return ResponsesResponse(service, found, True, _number("starting_after", asked.get("starting_after", "-1")))
        return json_response(response_of(found))

    @app.delete(RESPONSES + "/{response_id}")
    async def delete(response_id: str) -> Response:
        """Delete a stored response."""
        found = await service.archive.response(response_id)
        service.archive.delete(found)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    @app.post(RESPONSES + "/{response_id}/cancel")
    async def cancel(response_id: str) -> Response:
        """End a response that runs in the background; a finished one does not change."""
        found = await service.archive.response(response_id)
        if not found.in_background:
            raise ApiError(400, f"{response_id} does not run in the background: close its connection instead")
        service.archive.cancel(found)
        return json_response(response_of(found))


async def _go_on(service: Service, last_event_id: str) -> Response:
    found, number = await service.archive.left_at(RESPONSES, last_event_id)
    return ResponsesResponse(service, found, True, _number("Last-Event-ID", number))


def _number(name: str, text: str) -> int:
    if not (text.isdecimal() and len(text) < 10) and text != "-1":
        raise RequestError(f"{name} must be the number of an event, not {text!r:.80}")
    return int(text)


def response_of(request: ApiRequest) -> dict[str, Any]:
    """Return the response object of ``request`` as it is now, finished or not."""
    form, exchange = cast(ResponseForm, request.form), request.exchange
    error = exchange.error
    try:
        if error is None and exchange.finished:
            (output,) = check_finished(exchange.outputs)
            return whole_response(form, output)
    except ApiError as failed:
        error = failed
    if error is None:
        return form.response("queued" if exchange.outputs[0] is None else "in_progress")
    told = api_error(error)
    if told.kind == CANCELLED:
        return form.response("cancelled")
    return form.response("failed", error={"code": "server_error", "message": str(told)})
