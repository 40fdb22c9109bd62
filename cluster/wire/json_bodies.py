"""Encodes and decodes frame bodies in JSON, and checks the texts in them."""

from __future__ import annotations

import threading
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from fastdecode.core.errors import FrameError

MAX_JSON_BYTES = 1 << 22
"""Most bytes of a JSON body. As Python objects it may take thirty times that, which stays below a frame's limit."""

MAX_TEXT = 4096

Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Message = TypeVar("Message", bound=msgspec.Struct)

_decoders: dict[type, msgspec.json.Decoder[Any]] = {}
_making = threading.Lock()


def encode_json(message: msgspec.Struct) -> bytes:
    """Return the bytes of a message, equal for equal messages."""
    return msgspec.json.encode(message, order="sorted")


def decode_json(kind: str, data: bytes | bytearray, form: type[Message]) -> Message:
    """Return the message in ``data``. Raise FrameError for invalid JSON, another form, or unprintable texts."""
    # Most characters of an error about malformed JSON, which may quote it
    max_error = 200
    try:
        message: Message = _decoder(form).decode(data)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"{kind}: {printable(str(error)[:max_error])}") from None
    for name, value in msgspec.structs.asdict(message).items():
        if isinstance(value, str) and not value.isprintable():
            raise FrameError(f"{kind}: {name} must be a text that can be printed")
    return message


def _decoder(form: type) -> msgspec.json.Decoder[Any]:
    """Return a decoder for messages of class ``form``.

    Only one thread at a time makes a decoder, since msgspec 0.22 may crash if two threads first use a class at once.
    """
    with _making:
        if form not in _decoders:
            _decoders[form] = msgspec.json.Decoder(form)
        return _decoders[form]


def printable(text: str) -> str:
    """Return ``text`` with "?" in place of each character that cannot be printed, such as a line break."""
    return text if text.isprintable() else "".join(each if each.isprintable() else "?" for each in text)
