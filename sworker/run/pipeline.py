"""The pipeline: k mini-batches take turns on the S-worker, and R-workers compute attention of the waiting ones.

Attention is the await point: a model's attention call leaves its greenlet, and returns with o. transformers looks up
attention functions by name in a process-wide table, so the function registered here has no state. The calling greenlet,
a :class:`ModelGreenlet`, says how to attend.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Protocol

import numpy as np
import torch
from greenlet import getcurrent, greenlet
from transformers import AttentionInterface

from fastdecode.core.metrics import HOST, MODEL, WAIT, StateClock
from fastdecode.core.protocols import AttentionBackend
from fastdecode.sworker.adapters.calls import DENSE, Calls, calls_of, index_argument
from fastdecode.sworker.model.code import ModelCode
from fastdecode.sworker.run.prompts import PromptAttention
from fastdecode.sworker.run.staging import HostStaging, PackedRows, Staging, rows_of
from fastdecode.sworker.run.threads import SharedCores

ATTENTION_NAME = "fastdecode"
"""The ``attn_implementation`` under which models call our attention."""


class ModelGreenlet(greenlet):
    """A greenlet that runs a model's forward.

    ``attend`` answers the forward's attention calls. ``attend_rows`` answers calls that pass q, k and v as numpy arrays
    [T, heads, dim]; None if layers must pass tensors. ``convolution``: the last convolution that the forward called,
    until the next recurrence uses it (`states.py`). ``memory``: arrays that the forward's layers share (`layers.py`).
    """

    def __init__(
        self,
        run: Callable[[], Any],
        attend: Callable[..., torch.Tensor],
        attend_rows: Callable[..., np.ndarray] | None = None,
    ) -> None:
        super().__init__(run)
        self.attend = attend
        self.attend_rows = attend_rows
        self.convolution: Any = None
        self.memory: Any = None


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return o [1, T, num_heads, …] of an attention call.

    ``query`` is [1, num_heads, T, head_dim]; ``key`` and ``value`` are [1, num_kv_heads, T, …]. The ``Calls`` of the
    module's kind pass them on (`calls.py`). An index in ``kwargs`` is sent first, as a layer of its own.
    """
    current = getcurrent()
    if not isinstance(current, ModelGreenlet):
        raise RuntimeError("a model loaded by FastDecode runs only inside its pipeline")
    if (name := index_argument(kwargs)) is not None:
        kwargs.pop(name).send_before(current.attend, module)
        kwargs["is_picked"] = True
    return calls_of(module).send(current.attend, module, query, key, value, attention_mask, **kwargs), None


def aligned(theirs: Callable[..., torch.Tensor], count_of: Callable[[int, int], int]) -> Callable[..., torch.Tensor]:
    """Return ``theirs``, a function of one tensor; in our forwards on CPUs, it computes whole vectors only."""

    @wraps(theirs)
    def either(rows: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        is_ours = isinstance(getcurrent(), ModelGreenlet) and rows.is_cpu and rows.is_floating_point()
        if not is_ours or kwargs.get("inplace") or "out" in kwargs:
            return theirs(rows, *args, **kwargs)
        count = rows.numel()
        if (padded := count_of(count, torch.get_num_threads())) == count and rows.is_contiguous():
            return theirs(rows, *args, **kwargs)
        flat = torch.cat([rows.reshape(-1), rows.new_zeros(padded - count)])
        return theirs(flat, *args, **kwargs)[:count].view(rows.shape)

    return either


def register_attention() -> None:
    """Register ``attn_implementation="fastdecode"`` with transformers.

    Without a mask function, transformers builds no masks.
    """
    AttentionInterface.register(ATTENTION_NAME, attend)


class MiniBatchForward:
    """A forward of the model over packed rows in its own greenlet, which pauses at every attention call."""

    def __init__(
        self,
        mini_batch: int,
        packed: PackedRows,
        code: ModelCode,
        backend: AttentionBackend,
        prompts: PromptAttention,
        staging: Staging | None = None,
    ) -> None:
        """``staging``: the pipeline's staging; by default, the staging for a model on the CPU."""
        self.mini_batch = mini_batch
        self.packed = packed
        self.layer = 0
        self._code = code
        self._staging = staging or HostStaging(backend)
        self._send_arrays: Any = getattr(self._staging, "send_arrays", None) if packed.is_plain else None
        self.own_greenlet = ModelGreenlet(self._run, self._attend, self._send_arrays and self._attend_rows)
        self._prompts = prompts

    def _run(self) -> torch.Tensor:
        """Return logits of the sampling rows, [num_sampled, vocab], in the model's dtype."""
        packed = self.packed
        return self._code.logits(packed.input_ids, packed.position_ids, packed.logits_rows)[: packed.num_sampled]

    def _attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        calls: Calls = DENSE,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Send q, k, v; attend prompt chunks meanwhile; pause until R-workers answer; return o [1, T, heads, dim]."""
        q, k, v = rows_of(query), rows_of(key), rows_of(value)
        if self.packed.is_plain:
            self._staging.send(self.mini_batch, self.layer, q, k, v)
        else:
            k, v = k[: self.packed.num_rows], v[: self.packed.num_rows]
            self._staging.send(self.mini_batch, self.layer, q[self.packed.attending_rows], k, v)
        if self.packed.tap:
            self.packed.tap.take(self.layer, q)
        here = self.packed.prompt_rows
        over_scored = bool(here) and self._prompts.over_latents
        if over_scored:
            q = rows_of(calls.scored(module, query))
        prompts = self._prompts.attend(self.layer, self.mini_batch, q, k, v, here) if here else []
        if over_scored:
            prompts = [calls.finished(module, o) for o in prompts]
        self.layer += 1
        remote = torch.as_tensor(self.own_greenlet.parent.switch())
        return self._assemble(remote.view(q.dtype), prompts, len(q))

    def _attend_rows(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Send q, k, v of plain rows; await R-workers; return o [T, heads, dim], valid until the next call."""
        self._send_arrays(self.mini_batch, self.layer, q, k, v)
        self.layer += 1
        o: np.ndarray = self.own_greenlet.parent.switch()
        return o

    def _assemble(self, remote: torch.Tensor, prompts: list[torch.Tensor], num_padded_rows: int) -> torch.Tensor:
        """Return o of all rows in packed order. ``remote``: rows from R-workers; ``prompts``: each chunk's rows."""
        if len(remote) == num_padded_rows:
            return remote[None]
        o = remote.new_zeros((num_padded_rows, *remote.shape[1:]))
        o[self.packed.attending_rows] = remote
        for rows, prompt in zip(self.packed.prompt_rows, prompts, strict=True):
            o[rows.rows] = prompt
        return o[None]


class Forward(Protocol):
    """The interface of a mini-batch's forward: a greenlet that pauses in attention calls, and ends with the logits."""

    mini_batch: int
    layer: int

    @property
    def own_greenlet(self) -> greenlet:
        """The forward's greenlet. The pipeline switches to it: first without arguments, later with o."""


class Graphs(Protocol):
    """The interface of a model's captured decodes (``ModelGraphs``)."""

    def forward(self, mini_batch: int, packed: PackedRows, staging: Staging) -> Forward | None:
        """Return a forward of ``packed`` that replays graphs; None if no captured graphs fit these rows."""


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
        """Keep the arguments, and make the staging for a model on the CPU if ``staging`` is None.

        ``cores``: given only for a model on the CPU, since a busy core does not slow down the queueing of a GPU's work.
        ``in_order``: mini-batches resume in a fixed order, not as their o arrive. Ranks need this, since their layers
        wait for each other.
        """
        self.staging = staging or HostStaging(backend)
        self.clock = clock
        self.cores = cores
        self.in_order = in_order

    def run(self, forwards: Sequence[Forward], overlap: bool = True) -> list[torch.Tensor]:
        """Return the logits of every mini-batch, [num_sampled, vocab] each.

        With two mini-batches, A and B, and layers 0, 1, …, every S segment ends by sending q, k, v::

            time      ──────────────────────────────────────────────────────────▶
            S-worker  │ A0 │ B0 │ A1 │ B1 │ A2 │ B2 │  …  │ An │ Bn │ head A │ head B
            R-worker       │ A0 │ B0 │ A1 │ B1 │ A2 │  …  │    │ Bn │
                      fill ┘    └── steady: each resumes when its o is there  └ drain

        On a GPU the S lane is the compute stream: this thread only queues its work, and copies down and up run
        concurrently (see :class:`fastdecode.sworker.run.cuda_staging.CudaStaging`). Without ``overlap``, for
        comparison, each mini-batch runs alone from first layer to last.
        """
        logits: dict[int, torch.Tensor] = {}
        self.staging.begin_step()
        try:
            groups = [list(forwards)] if overlap else [[forward] for forward in forwards]
            with self.cores.pinned() if self.cores else contextlib.nullcontext():
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
        *o: torch.Tensor | np.ndarray,
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
        """Remove a mini-batch from ``paused`` and return it: of those whose o can be collected, the one paused longest.

        If no o can be collected, take the one paused longest; the caller then waits for its o.
        """
        waiting = [forward.mini_batch for forward in paused]
        place = waiting.index(self.staging.next_ready(waiting[:1] if self.in_order else waiting))
        forward = paused[place]
        del paused[place]
        return forward
