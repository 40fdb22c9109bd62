"""Request bodies from the connection: limited in bytes and time, and decoded as structs."""

from __future__ import annotations

import asyncio
import logging
from typing import TypeVar

import msgspec
from fastapi import Request

from fastdecode.api.text_limits import LONG_TEXT_BYTES
from fastdecode.server.errors import ApiError
from fastdecode.server.json_bounds import parse_json
from fastdecode.server.protocol import read_body
from fastdecode.server.service import Service

logger = logging.getLogger(__name__)

Body = TypeVar("Body", bound=msgspec.Struct)


async def read_request(service: Service, request: Request, kind: type[Body]) -> tuple[Body, int]:
    """Return the HTTP body decoded as a ``kind``, and its length in bytes.

    Raise ApiError or RequestError if the body is too long, arrives too slowly, or is malformed.
    """
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
    except (TimeoutError, asyncio.TimeoutError):  # two different classes before Python 3.11
        raise ApiError(408, f"the body did not arrive within {seconds:g} seconds") from None


async def _join(request: Request, most: int, too_long: ApiError) -> bytearray:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise too_long
    return body  # the buffer itself, since all streams would wait while it is copied
