"""Whole numbers in bodies of requests: JSON has one kind of number, and some clients write 4 as 4.0."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec

ANY_INTS = frozenset({"prompt"})
"""Fields of any type in which numbers are token ids."""


def with_whole_numbers(body: Mapping[str, Any], kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return ``body`` with ints for such numbers where ``kind`` wants ints; all else stays as it is."""
    return {name: _whole(value) if name in _int_fields(kind) else value for name, value in body.items()}


@cache
def _int_fields(kind: type[msgspec.Struct]) -> frozenset[str]:
    told = msgspec.inspect.type_info(kind)
    fields = told.fields if isinstance(told, msgspec.inspect.StructType) else ()
    return frozenset(each.encode_name for each in fields if _takes_ints(each.type) or each.name in ANY_INTS)


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
