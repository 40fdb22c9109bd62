"""JSON messages in which the fuzzer replaces values, and a channel that delivers a message."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import atheris

from fastdecode.core.errors import FrameError

ODD: list[Any] = [None, True, 0, -1, 1, 16, 1 << 31, 1 << 63, 10**400, 0.5, -0.0, 1e39, float("nan"), float("inf")]
ODD += ["", "float32", "int4", "\ud800", "\n", "x" * 5000, [], [[]], [1] * 5, {}, {"a": 1}]


class Message:
    """A ``Channel`` with a single message from a peer; answers are ignored."""

    def __init__(self, parts: list[bytes]) -> None:
        self.parts = list(parts)

    def send(self, parts: Any) -> None:
        """Do nothing."""

    def receive(self, timeout_seconds: float) -> bytes | None:
        """Return the next part."""
        return self.parts.pop(0)

    def read_into(self, buffer: Any) -> None:
        """Copy the next part into ``buffer``, which must have the same length, as with libzmq."""
        if not self.parts or len(self.parts[0]) != memoryview(buffer).nbytes:
            raise FrameError("the part has another length")
        memoryview(buffer)[:] = self.parts.pop(0)

    def close(self) -> None:
        """Do nothing."""


def mutated(data: bytes, good: bytes, finish: Callable[[Any], None] = lambda value: None) -> bytes:
    """Return ``data`` itself; or, if its first byte is 1, the JSON message ``good`` with some values replaced."""
    if data[:1] != b"\x01":
        return data
    provider, value = atheris.FuzzedDataProvider(data[1:]), json.loads(good)
    for _ in range(provider.ConsumeIntInRange(1, 3)):
        place: Any = value
        while isinstance(place, dict | list) and place:
            key = provider.PickValueInList(list(place) if isinstance(place, dict) else list(range(len(place))))
            if not isinstance(place[key], dict | list) or provider.ConsumeIntInRange(0, 7) == 0:
                place[key] = _value(provider)
                break
            place = place[key]
    finish(value)
    return json.dumps(value).encode()


def _value(provider: Any) -> Any:
    choice = provider.ConsumeIntInRange(0, 3)
    if choice == 0:
        return provider.ConsumeIntInRange(-2, 600)
    return provider.ConsumeUnicode(8) if choice == 1 else copy.deepcopy(provider.PickValueInList(ODD))
