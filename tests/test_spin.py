"""Waiting without sleeping: it finds what comes, ends in time, and leaves a core to its other users."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

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
            assert len(looks) == 1 or time.perf_counter() - disturbed > REST_SECONDS
        finally:
            process.kill()
