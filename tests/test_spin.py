"""Waiting without sleeping: it finds what comes, ends in time, and leaves a core to its other users."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from fastdecode.cluster.links.link import REST_SECONDS, Spin

LONG_SECONDS = 1e6


@pytest.fixture
def one_core() -> Iterator[int]:
    """Pin this thread to one core for the test, and undo that afterwards."""
    before = os.sched_getaffinity(0)
    core = max(before)
    os.sched_setaffinity(0, {core})
    yield core
    os.sched_setaffinity(0, before)


def test_what_comes_is_found_and_nothing_is_waited_for_longer_than_asked() -> None:
    """A value that another thread sets is seen without a sleep, and without a value the wait ends in time."""
    found: list[int] = []
    timer = threading.Timer(0.05, found.append, [7])
    timer.start()
    spin = Spin(LONG_SECONDS)
    while not (answer := spin.until(lambda: found[0] if found else 0)):
        time.sleep(0.01)  # The wait was disturbed.
    assert answer == 7
    assert Spin(0.005).until(lambda: "") == ""


def test_a_core_that_others_use_is_left_alone(one_core: int) -> None:
    """Beside a busy process a spin ends long before its time, and the next one does not begin."""
    program = f"import os; os.sched_setaffinity(0, [{one_core}]); print(flush=True)\nwhile 1: pass"
    spin, looks = Spin(LONG_SECONDS), []
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout and process.stdout.readline()
            assert not spin.until(lambda: looks.append(1))
            disturbed = time.perf_counter()
            looks.clear()
            assert not spin.until(lambda: looks.append(1))
            assert len(looks) == 1 or time.perf_counter() - disturbed > REST_SECONDS[0]
        finally:
            process.kill()


class SharedCore:
    """A clock that every look moves on: by little, or, while others use the core, by a time slice."""

    def __init__(self) -> None:
        self.seconds, self.is_shared = 0.0, True
        self.spin = Spin(LONG_SECONDS, now=lambda: self.seconds)

    def rest_seconds(self) -> float:
        """Spin until it is disturbed; return for how long no spin begins then."""
        assert not self.spin.until(self._look)
        disturbed = self.seconds
        while True:
            before = self.seconds
            self.is_shared = False
            found = self.spin.until(self._look_twice())
            self.is_shared = True
            if found:
                return before - disturbed
            self.seconds = before + REST_SECONDS[0] / 4

    def _look(self) -> bool:
        self.seconds += 0.003 if self.is_shared else 1e-6
        return False

    def _look_twice(self) -> Callable[[], bool]:
        """Return a look that finds something the second time, which only a thread that spins gets to see."""
        looks = iter((False, True))
        return lambda: next(looks)


def test_rests_grow_while_the_core_is_shared_and_shrink_once_it_is_not() -> None:
    """A busy core is left alone for longer and longer; a disturbance now and then costs a short rest."""
    core = SharedCore()
    least, most = REST_SECONDS
    rests = [core.rest_seconds() for _ in range(10)]
    assert rests[0] == pytest.approx(least, rel=0.5)
    assert rests == sorted(rests)
    assert rests[-1] == pytest.approx(most, rel=0.1)
    for _ in range(8):
        core.seconds += 10 * most
        rests.append(core.rest_seconds())
    assert rests[-1] == pytest.approx(least, rel=0.5)
