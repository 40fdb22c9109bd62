"""The errors that FastDecode raises on purpose, and a context that defers interrupts.

Each error says what was wrong and what would be right.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import contextlib
import threading
from collections.abc import Iterator
from typing import Any


class FastDecodeError(Exception):
    """Base of all deliberate failures. The command line prints the message as one line and exits with 1."""


class ConfigError(FastDecodeError, ValueError):
    """A flag or setting that cannot work. The command line exits with 2."""


class ModelLoadError(FastDecodeError):
    """The model folder is missing, incomplete or corrupt."""


class UnsupportedModelError(FastDecodeError):
    """The model can be loaded, but R-workers cannot compute its attention."""

    what_it_does: str = ""  # the model's feature that R-workers do not support, if known apart from the message


class RequestError(FastDecodeError, ValueError):
    """A request that can never run: empty, too long, or with invalid token ids. Other requests are not affected."""


class CapacityError(FastDecodeError):
    """Not enough memory; the message says how much is needed."""


class BackendError(FastDecodeError):
    """An R-worker refused a plan or a payload, which only a bug can cause."""


class PlanError(FastDecodeError):
    """No plan meets the requirements; the message names the constraint, and by how much it fails."""


class ProfileError(FastDecodeError):
    """A hardware profile cannot be read, or lacks a figure that the plan needs."""


class BusyError(BackendError):
    """The R-worker already serves another S-worker."""


class WorkerLostError(BackendError):
    """An R-worker is lost, with all keys and values that it cached. The other R-workers continue."""


class DamagedError(WorkerLostError):
    """An R-worker's memory has changed: cached blocks differ from their checksums. The R-worker is dropped."""


class NoRWorkerError(WorkerLostError):
    """The last R-worker is lost; an R-worker may still join."""


class RankLostError(FastDecodeError):
    """A rank of tensor parallelism is lost, so the whole job ends."""


class ChainError(FastDecodeError):
    """A file of parked keys and values is damaged, or belongs to another cache. It is not read."""


class SupersededError(FastDecodeError):
    """Another S-worker has taken over this one's R-workers, so this one must end."""


class FrameError(BackendError):
    """A message between S-worker and R-worker violates the wire format. The receiver has ignored it."""


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Within the context, defer SIGINT until the end.

    Only the main thread is ever interrupted, so other threads have nothing to defer.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[tuple[int, Any]] = []
    # Python's `signal.signal` takes twenty times as long, since it looks up an enum name for each handler
    handler = _signal.signal(_signal.SIGINT, lambda number, frame: received.append((number, frame)))
    try:
        yield
    finally:
        _signal.signal(_signal.SIGINT, handler)
        if received and callable(handler):
            handler(*received[0])


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Within the context, add the file name ``path`` to an OSError that names no file, such as a full disk's."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or path
        raise
