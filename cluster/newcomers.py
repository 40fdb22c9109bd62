"""R-workers that come and go: attempts to open those that ask to join, who has joined or come back, who asked to leave,
and in whose arithmetic all attend."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastdecode.core.errors import FastDecodeError, SupersededError
from fastdecode.core.types import RWorkerInfo, best_common_isa
from fastdecode.kinds.layout import KVLayout

if TYPE_CHECKING:  # most pools have none, and need no ZeroMQ
    from fastdecode.cluster.joining import JoinListener
    from fastdecode.cluster.remote import RemoteWorker

RETURN_SECONDS = 1.0
"""Between two attempts to open an R-worker that was lost."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Joined:
    """An R-worker that has joined and is open, and its description."""

    worker: RemoteWorker
    info: RWorkerInfo


class Returns:
    """R-workers that were lost and do not ask to join: each is opened again in a thread, until it answers."""

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        self._returned: queue.SimpleQueue[Joined] = queue.SimpleQueue()
        self._is_closed = threading.Event()
        self._superseded: SupersededError | None = None

    def expect(self, make: Callable[[], RemoteWorker]) -> None:
        """From now on open ``make()``, again and again; never waits."""
        threading.Thread(target=self._await, args=(make,), name="return", daemon=True).start()

    def take(self) -> list[Joined]:
        """Those that have come back since the last call; SupersededError where one serves the next S-worker."""
        if self._superseded:
            raise self._superseded
        return [self._returned.get() for _ in range(self._returned.qsize())]

    def close(self) -> None:
        """Also those that nobody took; may be called twice."""
        self._is_closed.set()
        self._superseded = None
        for joined in self.take():
            joined.worker.close()

    def _await(self, make: Callable[[], RemoteWorker]) -> None:
        while not self._is_closed.wait(RETURN_SECONDS):
            worker = make()
            try:
                worker.open(self._layout)
                joined = Joined(worker, worker.opened())
            except SupersededError as error:
                worker.close()
                self._superseded = error
                return
            except FastDecodeError as error:
                worker.close()
                logger.debug("not back yet: %s", error)
                continue
            self._returned.put(joined)
            if self._is_closed.is_set():
                self.close()
            return


class Newcomers:
    """R-workers that have joined and wait until the pool admits them."""

    def __init__(self, listener: JoinListener) -> None:
        """``listener`` is closed with this."""
        self._listener = listener
        self._waiting: list[Joined] = []
        self._asked_to_leave: set[str] = set()

    def open(self, layout: KVLayout) -> None:
        """From now on joining R-workers are opened for ``layout``."""
        self._listener.open(layout)

    @property
    def num_waiting(self) -> int:
        """R-workers that have joined and were not admitted yet; never waits."""
        self._waiting += self._listener.joined()
        return len(self._waiting)

    def take(self, most: int | None = None) -> list[Joined]:
        """The first ``most`` of those that wait, None: all."""
        count = self.num_waiting if most is None else most
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken

    def asks_to_leave(self, name: str) -> None:
        """The R-worker ``name`` asks to be let go."""
        self._asked_to_leave.add(name)

    def forget(self, name: str) -> None:
        """The R-worker ``name`` is gone, and may join again."""
        self._asked_to_leave.discard(name)
        self._listener.forget(name)

    def dismiss(self, name: str) -> None:
        """The R-worker ``name`` was let go; it may join again only where its process ends, since it asked for that."""
        has_asked = name in self._asked_to_leave
        self.forget(name)
        if not has_asked:
            self._listener.dismissed(name)

    def close(self) -> None:
        """Close the listener and those that wait; may be called twice."""
        self._listener.close()
        for joined in self._waiting:
            joined.worker.close()
        self._waiting = []


class Arithmetic:
    """The instruction sets in which the R-workers of a pool attend: each rounds in its own way.

    ``of_merges``: the one in which their partial results are to be merged, "scalar" or "auto".
    """

    def __init__(self) -> None:
        self.of_merges = "auto"
        self._isas: dict[str, str] = {}

    def add(self, infos: Sequence[RWorkerInfo]) -> None:
        """R-workers of the pool; warns where they round in another way than those before them."""
        before = len(self._isas)
        for info in infos:
            self._isas.setdefault(info.isa, info.name)
        self.of_merges = "scalar" if set(self._isas) == {"scalar"} else "auto"
        if len(self._isas) > max(before, 1):
            logger.warning(
                "R-workers attend in different arithmetic (%s): on another one a sequence may get other tokens; "
                "--uniform-arithmetic %s makes all take one",
                ", ".join(f"{isa} on {name}" for isa, name in self._isas.items()),
                best_common_isa(self._isas),
            )


FIRST_SECONDS, MOST_SECONDS = 1.0, 30.0
"""Least time from a failed attempt to the next at the same address: it doubles from the first to the second."""

MOST_ADDRESSES = 1024
MOST_REASONS = 16
"""That are remembered of one address."""


@dataclass
class _Failures:
    seconds: float = 0.0
    next_time: float = 0.0
    reasons: set[str] = field(default_factory=set)


class Attempts:
    """Addresses at which an attempt failed; those that failed last are ``remembered``. For any thread."""

    def __init__(self) -> None:
        self.remembered: OrderedDict[str, _Failures] = OrderedDict()

    def may_try(self, address: str) -> bool:
        """False for a while after a failure."""
        failures = self.remembered.get(address)
        return failures is None or time.monotonic() >= failures.next_time

    def failed(self, address: str, reason: str) -> bool:
        """Note a failure; True where ``reason`` is new for this address, and so worth a line in the log."""
        failures = self.remembered.pop(address, None) or _Failures()
        failures.seconds = min(max(FIRST_SECONDS, 2 * failures.seconds), MOST_SECONDS)
        failures.next_time = time.monotonic() + failures.seconds
        is_new = reason not in failures.reasons and len(failures.reasons) < MOST_REASONS
        if is_new:
            failures.reasons.add(reason)
        self.remembered[address] = failures
        if len(self.remembered) > MOST_ADDRESSES:
            self.remembered.popitem(last=False)
        return is_new

    def succeeded(self, address: str) -> None:
        """Forget what failed there."""
        self.remembered.pop(address, None)
