"""Cross-origin requests: which pages in browsers may ask this server."""

from __future__ import annotations

import json
from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from fastdecode.api.settings import is_loopback
from fastdecode.core.errors import ConfigError
from fastdecode.server.archive import REQUEST_ID
from fastdecode.server.server_settings import ServerSettings

ANY = ("*",)


def with_cors(app: ASGIApp, settings: ServerSettings) -> ASGIApp:
    """Return ``app`` as the pages that ``settings`` allow may ask it; ConfigError for lists that are none.

    Where no origins are named, pages of any may ask a server that only this machine reaches and that has no key.
    """
    is_open = is_loopback(settings.host) and not settings.api_keys
    origins = _read("allowed_origins", settings.allowed_origins, ANY if is_open else ())
    methods = _read("allowed_methods", settings.allowed_methods, ANY)
    headers = _read("allowed_headers", settings.allowed_headers, ANY)
    if not origins:
        return app
    return CORSMiddleware(
        app, origins, methods, headers, allow_credentials=settings.allow_credentials, expose_headers=[REQUEST_ID]
    )


def _read(name: str, given: Sequence[str], default: Sequence[str]) -> tuple[str, ...]:
    """The values of a flag: one each, several with commas, or a JSON list as vLLM takes it."""
    if not given:
        return tuple(default)
    found: list[str] = []
    for each in given:
        if not each.lstrip().startswith("["):
            found += filter(None, map(str.strip, each.split(",")))
            continue
        try:
            read = json.loads(each)
        except ValueError:
            read = None
        if not isinstance(read, list) or not all(isinstance(one, str) for one in read):
            raise ConfigError(f"{name}: {each!r:.80} is no JSON list of texts, such as '[\"https://a.example\"]'")
        found += read
    return tuple(found)
