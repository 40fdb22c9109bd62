"""Faults of an R-worker's host, injected for tests of audits: wrong results, and bits that change in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastdecode import _rworker
from fastdecode.core.errors import ConfigError
from fastdecode.core.types import SpanMode


@dataclass(frozen=True)
class Faults:
    """Rates of flipped bits: once in every N stored blocks, and once in every M rows of results; 0 means never.

    N is ``every_block`` and M is ``every_row``.
    """

    every_block: int = 0
    every_row: int = 0
    seed: int = 0

    @classmethod
    def of(cls, text: str) -> Faults:
        """Return the faults in ``text``, such as "every_row=10000,seed=3". Raise ConfigError if malformed."""
        try:
            return cls(**{name: int(value) for name, value in (each.split("=") for each in text.split(","))})
        except (TypeError, ValueError):
            raise ConfigError(f"inject_faults: {text!r} is not like every_block=10000,every_row=0,seed=1") from None


class FaultyRWorker:
    """A C++ R-worker on a host with ``faults``. ``num_faults``: how many bits were flipped."""

    def __init__(self, worker: _rworker.RWorker, faults: Faults, layers: Sequence[int]) -> None:
        """``layers``: the layers in whose cached blocks bits may be flipped."""
        self._worker, self._faults, self._layers = worker, faults, list(layers)
        self._random = np.random.default_rng(faults.seed)
        self._spans = np.zeros((0, 4), np.int64)
        self._outputs: dict[int, tuple[Any, ...]] = {}
        self.num_faults = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def begin_step(self, controls: np.ndarray, mini_batches: list[np.ndarray]) -> None:
        self._worker.begin_step(controls, mini_batches)
        self._spans = np.concatenate([self._spans[:0], *mini_batches])

    def submit(self, mini_batch: int, layer: int, *arrays: Any) -> None:
        self._outputs[mini_batch] = arrays[3:]
        self._worker.submit(mini_batch, layer, *arrays)

    def wait(self, mini_batch: int) -> None:
        self._worker.wait(mini_batch)
        self._spoil(self._outputs.pop(mini_batch))

    def run(self, mini_batch: int, layer: int, *arrays: Any) -> None:
        self._worker.run(mini_batch, layer, *arrays)
        self._spoil(arrays[3:])

    def end_step(self) -> Any:
        report = self._worker.end_step()
        for sequence_id, context_len, num_rows, mode in self._spans.tolist():
            if mode != SpanMode.READ:
                self._flip(sequence_id, context_len, context_len + num_rows)
        self._spans = self._spans[:0]
        return report

    def abandon_step(self) -> None:
        self._outputs.clear()
        self._spans = self._spans[:0]
        self._worker.abandon_step()

    def _spoil(self, outputs: tuple[Any, ...]) -> None:
        """Flip a low bit of one number in some rows of o and of partial results."""
        for output in outputs:
            if output is None or not len(output) or not self._faults.every_row:
                continue
            for row in np.flatnonzero(self._random.random(len(output)) < 1 / self._faults.every_row).tolist():
                numbers = output[row].reshape(-1).view(np.uint16)
                numbers[2 * int(self._random.integers(len(numbers) // 2))] ^= np.uint16(1 << 3)
                self.num_faults += 1

    def _flip(self, sequence_id: int, start: int, end: int) -> None:
        """Flip a bit in some of the blocks that tokens ``start`` to ``end`` of a sequence have filled."""
        size = self._worker.block_size
        for block in range(start // size, end // size):
            if self._faults.every_block and self._random.random() < 1 / self._faults.every_block:
                layer, bit = int(self._random.choice(self._layers)), int(self._random.integers(1 << 30))
                self._worker.flip_bit(sequence_id, layer, block * size, bit)
                self.num_faults += 1
