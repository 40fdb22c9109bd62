"""CUDA graphs of the model's code between attention calls: a decode step without the model's Python.

A segment runs from one layer's o to the next layer's q, k and v. The first begins with the token ids, the last ends
with the logits. A graph computes on the addresses of its capture, so the inputs and outputs of a segment are static
rows::

token ids, positions ─▶ │ graph 0 │ ─▶ q, k, v ─▶ Staging.send … collect ─▶ o ─▶ │ graph 1 │ ─▶ … ─▶ logits

Mini-batches alternate: between two segments of one mini-batch, a segment of another runs. Meanwhile the first one's
residual stream, cos and sin stay in its graphs' memory pool. So each mini-batch has its own pool, static rows and
graphs. Its graphs for several row counts share pool and rows, since a step uses only one row count. Static rows are
read and written only on the compute stream, in the order of its work (staging gathers q, k and v in its own buffer), so
no events are needed.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from greenlet import greenlet

from fastdecode.sworker.adapters.calls import DENSE, Calls
from fastdecode.sworker.model.code import ModelCode
from fastdecode.sworker.model.prepack import equal_within_rounding
from fastdecode.sworker.run.pipeline import ModelGreenlet
from fastdecode.sworker.run.staging import PackedRows, Staging, rows_of

logger = logging.getLogger(__name__)

ROW_COUNTS = (16, 32, 64, 128, 256, 384, 512, 768, 1024)
"""Row counts for which graphs are captured. A mini-batch is padded to the next larger count.

With more rows, the GPU computes longer than a launch takes.
"""


class GraphRecorder:
    """The part of ``torch.cuda`` that :class:`ModelGraphs` uses. Tests replace it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Run the context's work on a separate CUDA stream, after all pending work; captures require such a stream."""
        gc.collect()  # during a capture, garbage collection could call into CUDA
        torch.cuda.synchronize(self._device)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            torch.cuda.synchronize(self._device)

    def pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def begin(self, pool: Any) -> Any:
        """Begin a capture in memory of ``pool``; return the graph, which has ``replay()`` after the capture."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")  # R-workers' threads may call CUDA meanwhile
        return graph

    def end(self, graph: Any) -> None:
        graph.capture_end()


@dataclass(frozen=True)
class AttentionRows:
    """Static rows of one attention call: q, k and v, which a graph writes, and o, which the next graph reads."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor


@dataclass(frozen=True)
class CapturedForward:
    """The model's forward as CUDA graphs for a fixed number of rows: one before each attention call, and a last one.

    ``input_ids``, ``position_ids``: int64 [1, rows]; ``logits`` [rows, vocab].
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    graphs: list[Any]
    attention: list[AttentionRows]
    logits: torch.Tensor

    def replay(self, attend: Callable[[int, AttentionRows], None]) -> None:
        """Compute ``logits`` from ``input_ids``. Between two graphs, ``attend(layer, rows)`` must fill ``rows.o``."""
        for layer, rows in enumerate(self.attention):
            self.graphs[layer].replay()
            attend(layer, rows)
        self.graphs[-1].replay()


class CudaGraphForward:
    """One mini-batch's forward by graphs, with the interface of a ``MiniBatchForward``."""

    def __init__(self, mini_batch: int, packed: PackedRows, captured: CapturedForward, staging: Staging) -> None:
        self.mini_batch = mini_batch
        self.layer = 0
        self.own_greenlet = greenlet(self._run)
        self._packed, self._captured, self._staging = packed, captured, staging

    def _run(self) -> torch.Tensor:
        """Return logits of every row, [num_rows, vocab]. Padding rows are unused, and keep values of earlier steps."""
        packed, captured = self._packed, self._captured
        width = packed.input_ids.shape[1]
        captured.input_ids[:, :width].copy_(packed.input_ids)
        captured.position_ids[:, :width].copy_(packed.position_ids)
        captured.replay(self._attend)
        return captured.logits[: packed.num_rows]

    def _attend(self, layer: int, rows: AttentionRows) -> None:
        count = self._packed.num_rows
        self._staging.send(self.mini_batch, layer, rows.q[:count], rows.k[:count], rows.v[:count])
        if self._packed.tap:
            self._packed.tap.take(layer, rows.q)
        self.layer += 1
        o = torch.as_tensor(self.own_greenlet.parent.switch())
        rows.o[:count].copy_(o.view(rows.o.dtype))


class ModelGraphs:
    """The captured graphs of a model, by mini-batch and row count.

    The engine captures graphs when it starts, as vLLM does: before it measures steps for the load limit, and before the
    prompt scratch gets the remaining memory.
    """

    def __init__(self, code: ModelCode, recorder: GraphRecorder, num_mini_batches: int, max_rows: int) -> None:
        """Capture graphs of up to ``max_rows`` rows for each mini-batch.

        A model runs without graphs, with a warning, if it reads values back from the GPU, or if its graphs give other
        logits than its own code.
        """
        smaller = sum(count < max_rows for count in ROW_COUNTS)
        counts = ROW_COUNTS[: smaller + 1]
        self._captured: list[dict[int, CapturedForward]] = []
        try:
            with recorder.aside(), torch.inference_mode():
                self._captured = [_Capture(code, recorder, counts).forwards for _ in range(num_mini_batches)]
        except RuntimeError as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            logger.warning("this model runs without CUDA graphs, launch by launch: %s", reason)

    @property
    def row_counts(self) -> list[int]:
        """The captured numbers of rows, smallest first; empty if the model runs without graphs."""
        return sorted(self._captured[0]) if self._captured else []

    def forward(self, mini_batch: int, packed: PackedRows, staging: Staging) -> CudaGraphForward | None:
        """Return a forward by graphs if all rows are decodes and graphs for that many rows exist; else None."""
        fitting = [count for count in self.row_counts if count >= packed.num_rows]
        if not fitting or packed.prompt_rows or packed.num_sampled != packed.num_rows:
            return None
        return CudaGraphForward(mini_batch, packed, self._captured[mini_batch][fitting[0]], staging)


class _Capture:
    """Captures one mini-batch's graphs for all row counts, in one memory pool. ``forwards`` holds them by row count."""

    def __init__(self, code: ModelCode, recorder: GraphRecorder, counts: tuple[int, ...]) -> None:
        self._code, self._recorder, self._pool = code, recorder, recorder.pool()
        self._max_rows, self._device = counts[-1], code.device
        self._static: dict[tuple[object, ...], torch.Tensor] = {}
        # The largest row count comes first, so that smaller ones reuse the memory that it took
        self.forwards = {count: self._capture(count) for count in reversed(counts)}

    def _capture(self, count: int) -> CapturedForward:
        # Forwards before a capture, in which libraries do set-up work that must not be captured
        warm_ups = 3
        for _ in range(warm_ups):
            self._run(count, [], lambda rows: None)
        graphs = [self._recorder.begin(self._pool)]

        def next_graph(rows: AttentionRows) -> None:
            self._recorder.end(graphs[-1])
            graphs.append(self._recorder.begin(self._pool))

        try:
            captured = self._run(count, graphs, next_graph)
        except BaseException:
            with contextlib.suppress(RuntimeError):  # ending a failed capture raises a second error
                self._recorder.end(graphs[-1])
            raise
        self._recorder.end(graphs[-1])
        self._prove(captured, count)
        return captured

    def _run(self, count: int, graphs: list[Any], attend: Callable[[AttentionRows], None]) -> CapturedForward:
        """Run the model's forward over the first ``count`` static rows; call ``attend`` in each attention call.

        ``graphs``: grows during a capture, one graph per attention call.
        """
        input_ids, position_ids = (self._rows(name, count, (), torch.int64)[None] for name in ("ids", "positions"))
        attention: list[AttentionRows] = []

        def in_attention_call(
            module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, calls: Calls = DENSE,
            **__: Any,
        ) -> torch.Tensor:  # fmt: skip
            q, k, v = (self._kept(name, rows_of(heads)) for name, heads in (("q", query), ("k", key), ("v", value)))
            o = self._rows("o", count, calls.output(query, key, value), query.dtype)
            attention.append(AttentionRows(q, k, v, o))
            attend(attention[-1])
            return o[None]

        def forward() -> torch.Tensor:
            return self._kept("logits", self._code.logits(input_ids, position_ids))

        logits = ModelGreenlet(forward, in_attention_call).switch()
        return CapturedForward(input_ids, position_ids, graphs, attention, logits)

    def _kept(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Copy ``rows`` into static rows, whose memory no later graph segment reuses; return the static rows."""
        return self._rows(name, len(rows), rows.shape[1:], rows.dtype).copy_(rows)

    def _rows(self, name: str, count: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return the first ``count`` static rows for tensor ``name`` of this shape, which all layers share."""
        key = (name, *shape, dtype)
        if key not in self._static:  # made in the first warm-up forward, so never in a graph's memory pool
            self._static[key] = torch.zeros((self._max_rows, *shape), dtype=dtype, device=self._device)
        return self._static[key][:count]

    def _prove(self, captured: CapturedForward, count: int) -> None:
        """Raise RuntimeError if the graphs' logits differ from the model's own on other tokens than at capture."""

        def values_as_o(rows: AttentionRows) -> None:
            values = rows.v if rows.v.shape[2] else rows.k[..., : rows.o.shape[2]]
            rows.o.copy_(values.repeat_interleave(rows.o.shape[1] // values.shape[1], dim=1))

        numbers = torch.arange(count, device=self._device)
        captured.input_ids.copy_(numbers % 7)
        captured.position_ids.copy_(numbers % 10)
        wanted = self._run(count, [], values_as_o).logits.clone()
        captured.logits.zero_()
        captured.replay(lambda layer, rows: values_as_o(rows))
        if not equal_within_rounding(captured.logits, wanted):
            raise RuntimeError("CUDA graphs of this model give other logits than its own code")
        captured.input_ids.zero_()
        captured.position_ids.zero_()
