"""A backend that records the order of calls, for tests of the pipeline and of staging."""

from __future__ import annotations

import time

import numpy as np

from fastdecode.perfmodel.lab.measure.decode_rig import InstantBackend


class Recorder(InstantBackend):
    """Answers with zeros. A result is ready after ``polls[mini_batch]`` calls of ``ready`` since its submit.
    ``log``: every submit, as "A0" for mini-batch 0, layer 0. ``polled``: number of calls of ``ready``.
    """

    def __init__(self, polls: dict[int, int] | None = None, delay_seconds: float = 0.0) -> None:
        super().__init__(block_size=32)
        self.polls, self.delay_seconds = polls or {}, delay_seconds
        self.log: list[str] = []
        self.asked: dict[int, int] = {}
        self.polled = 0
        self._shapes: dict[int, tuple[int, ...]] = {}

    def submit(self, mini_batch: int, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        self.log.append(f"{'ABCD'[mini_batch]}{layer}")
        self.asked[mini_batch] = 0
        self._shapes[mini_batch] = q.shape

    def ready(self, mini_batch: int) -> bool:
        self.asked[mini_batch] += 1
        self.polled += 1
        return self.asked[mini_batch] > self.polls.get(mini_batch, 0)

    def collect(self, mini_batch: int) -> np.ndarray:
        if self.delay_seconds:  # even sleep(0) yields the core
            time.sleep(self.delay_seconds)
        return np.zeros(self._shapes[mini_batch], np.float32)


class Bits(Recorder):
    """Keeps what was submitted and answers with q."""

    def __init__(self) -> None:
        super().__init__()
        self.submitted: list[tuple[np.ndarray, ...]] = []

    def submit(self, mini_batch: int, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        super().submit(mini_batch, layer, q, k, v)
        self.submitted.append((q, k, v))

    def collect(self, mini_batch: int) -> np.ndarray:
        return self.submitted[-1][0]
