"""Every error FastDecode raises on purpose, each with what was wrong and what would be right; and Ctrl-C held back."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import contextlib
import threading
from collections.abc import Iterator
from typing import Any


class FastDecodeError(Exception):
    """Base of all deliberate failures: the command line prints its message as one line and exits 1."""


class ConfigError(FastDecodeError, ValueError):
    """A flag or setting that cannot work; the command line exits 2."""


class ModelLoadError(FastDecodeError):
    """The model folder is missing, incomplete or corrupt."""


class UnsupportedModelError(FastDecodeError):
    """The model loads, but its attention cannot be handed to R-workers."""


class RequestError(FastDecodeError, ValueError):
    """A request that can never run (empty, too long, bad token ids); other requests are untouched."""


class CapacityError(FastDecodeError):
    """Not enough memory for what was asked; the message says how much it takes."""


class BackendError(FastDecodeError):
    """An R-worker refused a plan or a payload: a bug, reported as such."""


class PlanError(FastDecodeError):
    """No plan can meet what was asked; the message names the constraint and by how much it fails."""


class ProfileError(FastDecodeError):
    """A hardware profile that cannot be read, or lacks what the plan needs."""


class BusyError(BackendError):
    """An R-worker that serves another S-worker."""


class WorkerLostError(BackendError):
    """An R-worker is gone, with everything it held; the others go on."""


class NoRWorkerError(WorkerLostError):
    """The last R-worker is gone, and others, or itself, may come."""


class RankLostError(FastDecodeError):
    """A rank of tensor parallelism is gone, and the job with it."""


class ChainError(FastDecodeError):
    """A file of parked keys and values that is not what was written, or is another cache's: it is not read."""


class SupersededError(FastDecodeError):
    """The session goes on with another S-worker, and this one must end."""


class FrameError(BackendError):
    """A message between an S-worker and an R-worker that the wire format does not allow; it changed nothing."""


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Hold SIGINT back within the block; it is delivered, as it would have been, when the block ends.

    Only the main thread is ever interrupted, so elsewhere there is nothing to hold back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[tuple[int, Any]] = []
    # signal.signal looks for an enum's name for each handler, which takes twenty times as long
    handler = _signal.signal(_signal.SIGINT, lambda number, frame: received.append((number, frame)))
    try:
        yield
    finally:
        _signal.signal(_signal.SIGINT, handler)
        if received and callable(handler):
            handler(*received[0])


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Have an OSError name the file at ``path``: that of a full disk names none."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or path
        raise
