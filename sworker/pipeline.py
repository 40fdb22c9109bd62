"""The pipeline: k mini-batches take turns on the S-worker while their attention is computed elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from fastdecode.clock import HOST, MODEL, WAIT, StateClock
from fastdecode.protocols import AttentionBackend
from fastdecode.sworker.forward import MiniBatchForward


class Pipeline:
    """Runs the mini-batches of a step over one backend, from one thread."""

    def __init__(self, backend: AttentionBackend, clock: StateClock) -> None:
        self.backend = backend
        self.clock = clock

    def run(self, forwards: Sequence[MiniBatchForward], overlap: bool = True) -> list[torch.Tensor]:
        """The logits of every mini-batch, [num_sampled, vocab] each.

        With two mini-batches, A and B, layers 0, 1, …; every S segment ends by submitting q, k, v::

            time      ──────────────────────────────────────────────────────────▶
            S-worker  │ A0 │ B0 │ A1 │ B1 │ A2 │ B2 │  …  │ An │ Bn │ head A │ head B
            R-worker       │ A0 │ B0 │ A1 │ B1 │ A2 │  …  │    │ Bn │
                      fill ┘    └── steady: each resumes when its o is there  └ drain

        Without ``overlap`` each mini-batch runs alone from first layer to last, for comparison.
        """
        logits: dict[int, torch.Tensor] = {}
        try:
            groups = [list(forwards)] if overlap else [[forward] for forward in forwards]
            for group in groups:
                self._interleave(group, logits)
        finally:
            for forward in forwards:
                forward.lane.throw()
        self.clock.enter(HOST)
        return [logits[forward.mini_batch] for forward in forwards]

    def _interleave(self, forwards: Sequence[MiniBatchForward], logits: dict[int, torch.Tensor]) -> None:
        paused: deque[MiniBatchForward] = deque()
        for forward in forwards:
            self._resume(forward, paused, logits)
        while paused:
            forward = self._next(paused)
            self._resume(forward, paused, logits, self.backend.collect(forward.mini_batch))

    def _resume(
        self, forward: MiniBatchForward, paused: deque[MiniBatchForward], logits: dict[int, torch.Tensor], *o: object
    ) -> None:
        """Run ``forward`` to its next attention call, or to its end."""
        self.clock.enter(MODEL, forward.mini_batch, forward.layer)
        result = forward.lane.switch(*o)
        self.clock.enter(WAIT)
        if forward.lane.dead:
            logits[forward.mini_batch] = result
        else:
            paused.append(forward)

    def _next(self, paused: deque[MiniBatchForward]) -> MiniBatchForward:
        """The longest paused mini-batch whose o is there; when there is none, the longest paused one, to wait for."""
        for forward in paused:
            if self.backend.ready(forward.mini_batch):
                paused.remove(forward)
                return forward
        return paused.popleft()
