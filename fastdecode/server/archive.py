"""Finds earlier requests for clients: by name, by the last event of a stream, or as a stored response."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from fastdecode.core.errors import RequestError
from fastdecode.server.api_request import ID_PREFIXES, ApiRequest, Asked, chat_meant
from fastdecode.server.errors import ApiError
from fastdecode.server.keeper import Keeper
from fastdecode.server.kept_files import FILE_NAME, KeptRequest
from fastdecode.server.protocol import ChatRequest, CompletionRequest
from fastdecode.server.responses_answer import ResponseForm, whole_response
from fastdecode.server.responses_request import RESPONSES, ResponsesRequest, messages_of

REQUEST_ID, LAST_EVENT_ID = "x-request-id", "last-event-id"
"""HTTP headers by which a client names its request, or the last stream event that it received."""

NOT_KEPT = "requests and responses are kept with --journal only"


class Archive:
    """Looks up the requests that ``keeper`` keeps. ``keeper``: None if this server keeps no requests.

    ``remake``: turns a stored record into an ApiRequest again.
    """

    def __init__(self, keeper: Keeper | None, remake: Callable[[KeptRequest], ApiRequest]) -> None:
        self.keeper = keeper
        self._remake = remake

    def name_of(self, headers: Mapping[str, str]) -> str | None:
        """Return the request's X-Request-Id; None without one or if nothing is kept. Raise ApiError if invalid."""
        name = headers.get(REQUEST_ID)
        if self.keeper is None or name is None:
            return None
        if not FILE_NAME.fullmatch(name):
            raise ApiError(400, f"X-Request-ID must be 1 to 128 of A-Z a-z 0-9 . _ -, not {name!r:.200}")
        return name

    def known(self, name: str | None, asked: Asked) -> ApiRequest | None:
        """Return the kept request called ``name``, or None. Raise ApiError 409 if its body differs from ``asked``."""
        found = self.keeper.held(name) if self.keeper and name else None
        if found and found.asked != asked:
            raise ApiError(409, f"X-Request-ID {name} belongs to a different request", param="X-Request-ID")
        return found

    async def conversation(self, asked: Asked) -> tuple[list[dict[str, Any]], ChatRequest | CompletionRequest]:
        """Return the conversation of ``asked`` without instructions, and ``asked`` as a chat or completion request.

        The conversation is [] unless ``asked`` is a Responses request.
        """
        if not isinstance(asked, ResponsesRequest):
            return [], chat_meant(asked, [])
        if self.keeper is None:
            asked.store = None
            for name in ("background", "previous_response_id"):
                if getattr(asked, name):
                    raise ApiError(400, f"{name} is not supported: {NOT_KEPT}", param=name)
        messages = await self._earlier(asked.previous_response_id) + messages_of(asked.input)
        return messages, chat_meant(asked, messages)

    async def response(self, response_id: str) -> ApiRequest:
        """Return the request of the stored response with this id. Raise ApiError 404 if there is none."""
        found = await self._find(RESPONSES, response_id)
        if found is None or not found.is_stored:
            why = "" if self.keeper else f": {NOT_KEPT}"
            raise ApiError(404, f"there is no stored response {response_id!r:.200}{why}")
        return found

    async def left_at(self, route: str, last_event_id: str) -> tuple[ApiRequest, str]:
        """Return the request whose stream sent ``last_event_id``, and the event's place in that stream.

        Raise ApiError if no kept request has this event.
        """
        answer_id, _, place = last_event_id.rpartition(":")
        if self.keeper is None:
            raise ApiError(400, f"Last-Event-ID: {NOT_KEPT}", param="Last-Event-ID")
        found = await self._find(route, answer_id)
        if found is None:
            raise ApiError(404, f"no stream with the event {last_event_id!r:.200}", param="Last-Event-ID")
        return found, place

    def cancel(self, request: ApiRequest) -> None:
        """Cancel ``request`` and stop its generation. No effect if it has ended."""
        if self.keeper:
            self.keeper.cancel(request)

    def delete(self, request: ApiRequest) -> None:
        """Delete ``request`` and its stored answer; if it still runs, abort it."""
        if self.keeper:
            self.keeper.delete(request.answer_id)

    async def _find(self, route: str, answer_id: str) -> ApiRequest | None:
        name = answer_id.removeprefix(ID_PREFIXES[route])
        if self.keeper is None or name == answer_id or not FILE_NAME.fullmatch(name):
            return None
        held = self.keeper.held(name)
        kept = None if held else await self.keeper.stored(name)
        found = self._remake(kept) if kept else held
        return found if found and found.route == route else None

    async def _earlier(self, response_id: str | None) -> list[dict[str, Any]]:
        """Return the messages of the conversation up to and including the stored response ``response_id``."""
        if response_id is None:
            return []
        try:
            found = await self.response(response_id)
        except ApiError as error:
            raise ApiError(400, str(error), param="previous_response_id") from None
        if not found.exchange.finished:
            raise RequestError(f"previous_response_id: {response_id} has not ended, or was not answered")
        (output,) = (each for each in found.exchange.outputs if each is not None)
        return found.messages + messages_of(whole_response(cast(ResponseForm, found.form), output)["output"])
