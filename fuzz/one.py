"""One target under libFuzzer: ``python fuzz/one.py TARGET [libFuzzer's options] [CORPUS]``.

Besides crashes and exceptions that are not documented it finds memory: no input may make us allocate more than a frame
may hold, and what it takes to read it.
"""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable

import atheris
import parsers
import sessions
from instrument import instrument

from fastdecode.api import settings
from fastdecode.cluster import remote
from fastdecode.cluster.links import link, port, shared_memory
from fastdecode.cluster.r_worker import host, kv_port, session
from fastdecode.cluster.wire import frames, handshake, messages, payload
from fastdecode.core import errors

TARGETS = parsers.TARGETS | sessions.TARGETS
MOST_BYTES = frames.FRAME_LIMIT + (1 << 24)


class Watched:
    """A target whose memory is looked at; the most that any input took is printed as it grows."""

    def __init__(self, target: Callable[[bytes], None]) -> None:
        self._target = target
        self._most = 1 << 20

    def __call__(self, data: bytes) -> None:
        """RuntimeError for an input that made us allocate too much at a time."""
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        self._target(data)
        taken = tracemalloc.get_traced_memory()[1] - before
        if taken > self._most:
            self._most = taken
            print(f"memory: {taken:,} bytes for an input of {len(data)}", file=sys.stderr, flush=True)
        if taken > MOST_BYTES:
            raise RuntimeError(f"{taken:,} bytes allocated; {MOST_BYTES:,} are the limit")


def main() -> None:
    """Does not return: libFuzzer ends the process."""
    target = TARGETS[sys.argv.pop(1)]
    instrument(frames, handshake, host, kv_port, link, messages, payload, port, remote, session, shared_memory)
    instrument(errors, settings)
    tracemalloc.start(1)
    atheris.Setup(sys.argv, Watched(target))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
