"""Run one target under libFuzzer: ``python fuzz/one.py TARGET [libFuzzer's options] [CORPUS]``.

It finds crashes, undocumented exceptions, and inputs that allocate too much memory: more than a frame may hold, plus
the parser's own memory.
"""

from __future__ import annotations

import inspect
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import atheris
import parsers
import sessions

from fastdecode.api import settings
from fastdecode.cluster.wire.frames import FRAME_LIMIT
from fastdecode.core import errors

TARGETS = parsers.TARGETS | sessions.TARGETS
MOST_BYTES = FRAME_LIMIT + (1 << 24)


class Watched:
    """A target whose memory use is measured. Whenever an input needs more than all before, that is printed."""

    def __init__(self, target: Callable[[bytes], None]) -> None:
        self._target = target
        self._most = 1 << 20

    def __call__(self, data: bytes) -> None:
        """Run the target. Raise RuntimeError if the input needed too much memory at any time."""
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        self._target(data)
        taken = tracemalloc.get_traced_memory()[1] - before
        if taken > self._most:
            self._most = taken
            print(f"memory: {taken:,} bytes for an input of {len(data)}", file=sys.stderr, flush=True)
        if taken > MOST_BYTES:
            raise RuntimeError(f"{taken:,} bytes allocated; {MOST_BYTES:,} are the limit")


def instrument(*modules: ModuleType) -> None:
    """Change every function of ``modules`` so that it reports to libFuzzer which of its branches ran.
    Functions are changed in place, so that names imported elsewhere are instrumented too. atheris's import hook does
    not find the modules of an editable install, whose files are elsewhere than their names say.
    """
    for module in modules:
        for function in _functions(vars(module), module.__name__):
            atheris.instrument_func(function)


def _functions(members: dict[str, Any], module: str) -> Iterator[FunctionType]:
    for member in list(members.values()):
        found = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if isinstance(found, FunctionType) and found.__module__ == module:
            yield found
        elif inspect.isclass(member) and member.__module__ == module:
            yield from _functions(dict(vars(member)), module)


def main() -> None:
    """Run the target. This never returns, since libFuzzer ends the process."""
    target = TARGETS[sys.argv.pop(1)]
    # All that the targets import of the cluster, so that a new target's parser is never missing
    cluster = [module for name, module in sys.modules.items() if name.startswith("fastdecode.cluster.")]
    instrument(errors, settings, *cluster)
    tracemalloc.start(1)
    atheris.Setup(sys.argv, Watched(target))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
