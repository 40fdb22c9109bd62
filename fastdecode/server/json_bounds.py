"""Limits the size of JSON bodies, and turns numbers such as 4.0 into integers.

The check runs before Python parses a body, because parsing holds up all other requests.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import msgspec
import numpy as np

from fastdecode.core.errors import RequestError

MOST_VALUES = 1 << 20
"""Approximate most elements and fields in a body."""

MOST_NODES = 1 << 16
"""Most lists, objects and fields of objects in a body. Each takes as long to parse as ten numbers."""

PIECE_BYTES = 1 << 18


def parse_json(data: bytes | bytearray) -> Any:
    """Return the parsed JSON ``data``. Raise RequestError if it is no UTF-8 JSON, or has too many values."""
    if len(data) > MOST_NODES:
        _check_size(data)
    # Matches an escape in JSON; the group matches half of a surrogate pair without its other half
    pair_or_half = re.compile(rb"\\(?:u(?i:d[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2}|(d[89a-f][0-9a-f]{2}))|.)", re.DOTALL)
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        half = next((each[1].decode() for each in pair_or_half.finditer(data[:PIECE_BYTES]) if each[1]), None)
        told = error if half is None else f"\\u{half} is half of a character: send both halves, or neither"
        raise RequestError(f"the body is not valid JSON: {told}") from None


def outside_strings(data: bytes | bytearray, piece_bytes: int = PIECE_BYTES) -> Iterator[bytes]:
    """Yield the parts of the JSON ``data`` outside its strings, in pieces so that other threads can run in between."""
    within, rest = False, b""
    for start in range(0, len(data), piece_bytes):
        piece = rest + data[start : start + piece_bytes]
        rest = b"\\" * ((len(piece) - len(piece.rstrip(b"\\"))) % 2)  # the next piece begins with an escaped character
        whole = piece[: len(piece) - len(rest)]
        parts = whole.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        yield b"".join(parts[within::2])
        within ^= len(parts) % 2 == 0


def _check_size(data: bytes | bytearray) -> None:
    """Raise RequestError if the JSON ``data`` has more than MOST_VALUES values or MOST_NODES nodes.

    It counts commas, colons and brackets, also those in strings. If there are too many, it counts without strings.
    """
    raw = (bytes(data[start : start + PIECE_BYTES]) for start in range(0, len(data), PIECE_BYTES))
    if _too_many(raw) and (found := _too_many(outside_strings(data))):
        raise RequestError(f"the body has more than {found}: send several requests")


def _too_many(pieces: Iterable[bytes]) -> str:
    """Return the limit that the JSON in ``pieces`` exceeds, or "". Other threads run between two pieces."""
    num_values = num_nodes = 0
    for piece in pieces:
        characters = np.frombuffer(piece, np.uint8)
        num_values += int(np.count_nonzero(characters == ord(",")))
        num_nodes += sum(int(np.count_nonzero(characters == ord(each))) for each in "[{:")
        if num_nodes > MOST_NODES:
            return f"{MOST_NODES} lists, objects and fields"
        if num_values + num_nodes > MOST_VALUES:
            return f"{MOST_VALUES} values"
    return ""


def with_whole_numbers(body: Mapping[str, Any], kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return ``body`` with integers for numbers such as 4.0, in fields where ``kind`` has integers.

    JSON has one kind of number, and some clients write 4.0 for 4.
    """
    return {name: _whole(value) if name in _int_fields(kind) else value for name, value in body.items()}


@cache
def _int_fields(kind: type[msgspec.Struct]) -> frozenset[str]:
    told = msgspec.inspect.type_info(kind)
    fields = told.fields if isinstance(told, msgspec.inspect.StructType) else ()
    # Fields of type Any whose numbers are token ids
    any_ints = frozenset({"prompt"})
    return frozenset(each.encode_name for each in fields if _takes_ints(each.type) or each.name in any_ints)


def _takes_ints(told: msgspec.inspect.Type) -> bool:
    kinds = told.types if isinstance(told, msgspec.inspect.UnionType) else (told,)
    if any(isinstance(each, msgspec.inspect.FloatType) for each in kinds):
        return False
    lists = [each.item_type for each in kinds if isinstance(each, msgspec.inspect.ListType)]
    return any(isinstance(each, msgspec.inspect.IntType) for each in (*kinds, *lists))


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list) and {float, list} & set(map(type, value)):
        return [_whole(each) for each in value]
    return value
