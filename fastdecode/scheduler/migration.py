"""Which sequences go from one R-worker to another, cache and all."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fastdecode.scheduler.admission import Admission
from fastdecode.scheduler.fleet import Fleet
from fastdecode.scheduler.residents import Residents
from fastdecode.scheduler.sequence import Sequence


@dataclass(frozen=True)
class Move:
    """``sequence``, which decodes and has ``num_tokens`` cached tokens, goes to ``num_blocks`` blocks of ``target``."""

    sequence: Sequence
    num_tokens: int
    target: int
    num_blocks: int


class Migration:
    """Between steps: whoever is on an R-worker that drains leaves it, and a newcomer gets its part of the load.

    Prompts stay where they are until they are computed.
    """

    def __init__(self, residents: Residents, admission: Admission, fleet: Fleet) -> None:
        self._residents = residents
        self._admission = admission
        self._fleet = fleet
        self._evens = False

    def even_out(self) -> None:
        """From here on, until the loads are even, sequences move to the least loaded."""
        self._evens = True

    def next(self) -> Move | None:
        """What to move next; the blocks for it are free, once the target has heard its controls."""
        if not self._evens and not self._fleet.draining:
            return None
        relative = self._relative_loads()
        for worker in self._fleet.draining:
            for sequence in self._leaving(worker):
                target = self._target(sequence, relative)
                if target is not None:
                    return self._move(sequence, target)
        return self._evening_move(relative) if self._evens else None

    def homeless(self) -> list[Sequence]:
        """Those on R-workers that drain, who could run elsewhere, but for whom nobody has room now."""
        if not self._fleet.draining:
            return []
        relative = self._relative_loads()
        return [
            sequence
            for worker in self._fleet.draining
            for sequence in self._leaving(worker)
            if self._admission.fits_elsewhere(sequence) and self._target(sequence, relative) is None
        ]

    def _leaving(self, worker: int) -> list[Sequence]:
        return [sequence for sequence in self._residents.on(worker) if sequence.sequence_id in self._residents.decoding]

    def _target(self, sequence: Sequence, relative: np.ndarray) -> int | None:
        """The least loaded R-worker that has room."""
        able = [worker for worker in self._fleet.accepting if self._admission.has_room_to_move(sequence, worker)]
        return min(able, key=lambda worker: relative[worker], default=None)

    def _evening_move(self, relative: np.ndarray) -> Move | None:
        """The longest sequence that brings the most and the least loaded R-worker together, not past each other."""
        accepting = self._fleet.accepting
        source = max(accepting, key=lambda worker: relative[worker], default=0)
        target = min(accepting, key=lambda worker: relative[worker], default=0)
        speeds = self._fleet.speeds
        most = (relative[source] - relative[target]) / (1 / speeds[source] + 1 / speeds[target])
        movable = [s for s in self._leaving(source) if s.num_tokens <= most]
        fitting = [s for s in movable if self._admission.has_room_to_move(s, target)]
        if not fitting:
            self._evens = False
            return None
        return self._move(max(fitting, key=lambda sequence: sequence.num_tokens), target)

    def _move(self, sequence: Sequence, target: int) -> Move:
        num_blocks = self._admission.blocks_for(sequence)
        self._residents.make_room(target, num_blocks)
        num_cached = sequence.num_tokens - 1  # its last token is not cached before the next step
        return Move(sequence, num_cached, target, num_blocks)

    def _relative_loads(self) -> np.ndarray:
        """Cached tokens over speed, float64 [num_workers]."""
        self._residents.table.refresh()
        return self._residents.kv_loads() / self._fleet.speeds
