"""The pipeline: k mini-batches take turns on the S-worker while their attention is computed elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch
from greenlet import greenlet

from fastdecode.core.metrics import HOST, MODEL, WAIT, StateClock
from fastdecode.core.protocols import AttentionBackend
from fastdecode.sworker.staging import HostStaging, Staging
from fastdecode.sworker.threads import SharedCores


class Forward(Protocol):
    """A mini-batch's way through the model; its greenlet pauses in every attention call and ends with the logits."""

    mini_batch: int
    layer: int

    @property
    def own_greenlet(self) -> greenlet:
        """The greenlet's function: the pipeline switches to it, with o from the second time on."""
        ...


class Pipeline:
    """Runs the mini-batches of a step over one backend, from one thread."""

    def __init__(
        self,
        backend: AttentionBackend,
        clock: StateClock,
        staging: Staging | None = None,
        cores: SharedCores | None = None,
        in_order: bool = False,
    ) -> None:
        """``staging`` is the forwards' own; by default that of a model on the CPU.

        ``cores`` is for a model that computes on this process's cores: a thread that only queues a GPU's work loses
        no time to a core that is taken. ``in_order``: the mini-batches take turns whether their o is there or not, as
        ranks must, whose layers wait for each other.
        """
        self.staging = staging or HostStaging(backend)
        self.clock = clock
        self.cores = cores
        self.in_order = in_order

    def run(self, forwards: Sequence[Forward], overlap: bool = True) -> list[torch.Tensor]:
        """The logits of every mini-batch, [num_sampled, vocab] each.

        With two mini-batches, A and B, layers 0, 1, …; every S segment ends by sending q, k, v::

            time      ──────────────────────────────────────────────────────────▶
            S-worker  │ A0 │ B0 │ A1 │ B1 │ A2 │ B2 │  …  │ An │ Bn │ head A │ head B
            R-worker       │ A0 │ B0 │ A1 │ B1 │ A2 │  …  │    │ Bn │
                      fill ┘    └── steady: each resumes when its o is there  └ drain

        On a GPU the S lane is the compute stream: this thread only queues its work, and the copies down and up run
        beside it (:class:`fastdecode.sworker.cuda_staging.CudaStaging` draws them).
        Without ``overlap`` each mini-batch runs alone from first layer to last, for comparison.
        """
        logits: dict[int, torch.Tensor] = {}
        self.staging.begin_step()
        try:
            groups = [list(forwards)] if overlap else [[forward] for forward in forwards]
            for group in groups:
                self._interleave(group, logits)
        finally:
            for forward in forwards:
                forward.own_greenlet.throw()
        self.clock.enter(HOST)
        return [logits[forward.mini_batch] for forward in forwards]

    def _interleave(self, forwards: Sequence[Forward], logits: dict[int, torch.Tensor]) -> None:
        paused: deque[Forward] = deque()
        for forward in forwards:
            self._resume(forward, paused, logits)
        while paused:
            forward = self._next(paused)
            self._resume(forward, paused, logits, self.staging.collect(forward.mini_batch))

    def _resume(
        self,
        forward: Forward,
        paused: deque[Forward],
        logits: dict[int, torch.Tensor],
        *o: torch.Tensor,
    ) -> None:
        """Run ``forward`` to its next attention call, or to its end."""
        self.clock.enter(MODEL, forward.mini_batch, forward.layer)
        self.staging.mark()
        if self.cores:
            self.cores.start()
        result = forward.own_greenlet.switch(*o)
        if self.cores:
            self.cores.stop()
        self.staging.mark()
        self.clock.enter(WAIT)
        if forward.own_greenlet.dead:
            logits[forward.mini_batch] = result
        else:
            paused.append(forward)

    def _next(self, paused: deque[Forward]) -> Forward:
        """The longest paused mini-batch whose o is there; when there is none, the longest paused one, to wait for."""
        waiting = [forward.mini_batch for forward in paused]
        mini_batch = waiting[0] if self.in_order else self.staging.next_ready(waiting)
        forward = next(forward for forward in paused if forward.mini_batch == mini_batch)
        paused.remove(forward)
        return forward
