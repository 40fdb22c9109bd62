"""An attention backend in plain numpy that can be checked by hand. It checks every call.

If all values of a sequence are c, its output is c (without sinks). It is the slow oracle of the real backends. Keys and
values stay float32; the KV dtype only rounds exports. It refuses int8 and int4, whose codes and scales belong to
R-workers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from fastdecode.core.dtypes import WIRE_DTYPE, from_wire, to_wire
from fastdecode.core.errors import BackendError
from fastdecode.core.types import RWorkerInfo, StepPlan, StepReport, Verb, WorkerReport
from fastdecode.kinds import Layer
from fastdecode.kinds.layout import KVLayout


@dataclass
class _Cached:
    """Token-major keys and values of one sequence, float32 [num_tokens, num_kv_heads, dim] per layer."""

    num_tokens: int
    keys: list[np.ndarray]
    values: list[np.ndarray]

    def first(self, num_tokens: int) -> _Cached:
        """Return a copy of the first ``num_tokens`` tokens."""
        return _Cached(num_tokens, [k[:num_tokens] for k in self.keys], [v[:num_tokens] for v in self.values])


@dataclass
class _Incoming:
    """A sequence that a job fills: its tokens once complete, and its missing (layer, token) rows."""

    sequence_id: int
    num_tokens: int
    missing: set[tuple[int, int]]


@dataclass
class FakeBackend:
    """An ``AttentionBackend`` for float32 models. It keeps all sequences of several pretended R-workers in one dict."""

    num_workers: int = 1
    num_blocks: int = 1 << 20
    block_size: int = 32
    own_cores: bool = False
    cached: dict[int, _Cached] = field(default_factory=dict)
    incoming: dict[int, _Incoming] = field(default_factory=dict)
    steps: list[StepPlan] = field(default_factory=list)
    _in_step: bool = False

    def open(self, layout: KVLayout) -> list[RWorkerInfo]:
        if layout.model_dtype != "float32":
            raise BackendError(f"the fake backend computes in float32, not {layout.model_dtype}")
        if layout.kv_dtype not in WIRE_DTYPE:
            raise BackendError(f"the fake backend keeps float32, float16 or bfloat16 caches, not {layout.kv_dtype}")
        self.layers, self.kv_dtype = layout.layers, layout.kv_dtype
        return [
            RWorkerInfo(f"fake-{index}", self.num_blocks, self.block_size, 1, "numpy", self.own_cores)
            for index in range(self.num_workers)
        ]

    def begin_step(self, plan: StepPlan) -> None:
        self.steps.append(plan)
        self._in_step = True
        for worker in plan.workers:
            for control in worker.controls:
                self._apply(
                    int(control["verb"]), *(int(control[name]) for name in ("sequence_id", "source_id", "num_tokens"))
                )
        count = len(plan.workers[0].mini_batches)
        self._spans = [np.concatenate([worker.mini_batches[i] for worker in plan.workers]) for i in range(count)]
        self._outputs: dict[int, np.ndarray] = {}
        self._times = np.zeros((2, count, len(self.layers)))
        for span in np.concatenate(self._spans):
            sequence = self.cached.setdefault(int(span["sequence_id"]), self._empty())
            if any(job.sequence_id == span["sequence_id"] for job in self.incoming.values()):
                raise BackendError(f"sequence {span['sequence_id']} is incoming: {span}")
            if sequence.num_tokens != span["context_len"]:
                raise BackendError(f"sequence {span['sequence_id']} has {sequence.num_tokens} tokens: {span}")

    def submit(self, mini_batch: int, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        self._times[0, mini_batch, layer] = time.perf_counter()
        outputs, row, query_row = [], 0, 0
        for span in self._spans[mini_batch]:
            count = int(span["num_rows"])
            sequence = self.cached[int(span["sequence_id"])]
            start = int(span["context_len"])
            for cache, new in ((sequence.keys, k), (sequence.values, v)):
                cache[layer] = np.concatenate([cache[layer][:start], new[row : row + count]])
            if span["mode"]:
                for i in range(count):
                    outputs.append(
                        attend_row(
                            q[query_row + i],
                            sequence.keys[layer],
                            sequence.values[layer],
                            start + i,
                            self.layers[layer],
                        )
                    )
                query_row += count
            row += count
        if (query_row, row, row) != (len(q), len(k), len(v)):
            raise BackendError(
                f"the plan has {query_row} attending of {row} rows; q, k, v have {len(q)}, {len(k)}, {len(v)}"
            )
        shape = (0, self.layers[layer].num_heads, self.layers[layer].value_head_dim)
        self._outputs[mini_batch] = np.stack(outputs) if outputs else np.zeros(shape, np.float32)
        self._times[1, mini_batch, layer] = time.perf_counter()

    def ready(self, mini_batch: int) -> bool:
        return mini_batch in self._outputs

    def collect(self, mini_batch: int) -> np.ndarray:
        return self._outputs.pop(mini_batch)

    def end_step(self) -> StepReport:
        for span in np.concatenate(self._spans):
            self.cached[int(span["sequence_id"])].num_tokens += int(span["num_rows"])
        self._in_step = False
        start, end = self._times
        return StepReport(tuple(WorkerReport(start, end, 0.0, 0, self.num_blocks) for _ in range(self.num_workers)))

    def abandon_step(self) -> None:
        kept = {job.sequence_id for job in self.incoming.values()}
        self.cached = {i: sequence for i, sequence in self.cached.items() if sequence.num_tokens or i in kept}
        self._in_step = False

    def export(self, worker: int, sequence_id: int, start: int = 0, num_tokens: int | None = None) -> np.ndarray:
        self._check_between_steps(worker, "export")
        if sequence_id not in self.cached:
            raise BackendError(f"export: sequence {sequence_id} is unknown")
        cached = self.cached[sequence_id]
        piece = slice(start, cached.num_tokens if num_tokens is None else start + num_tokens)
        if not 0 <= piece.start <= piece.stop <= cached.num_tokens:
            raise BackendError(
                f"export: {piece.stop - start} tokens from token {start} on; sequence {sequence_id} has "
                f"{cached.num_tokens}"
            )
        return np.concatenate(
            [
                _token_bytes(cached.keys[layer][piece], cached.values[layer][piece], self.kv_dtype)
                for layer in range(len(self.layers))
            ]
        )

    def import_(self, worker: int, sequence_id: int, num_tokens: int, data: np.ndarray, start: int = 0) -> None:
        self._check_between_steps(worker, "import")
        if start == 0 and sequence_id in self.cached:
            raise BackendError(f"import: sequence {sequence_id} exists already")
        if start and (length := self.cached[sequence_id].num_tokens) != start:
            raise BackendError(f"import: start is {start}, and sequence {sequence_id} has {length} tokens")
        item = WIRE_DTYPE[self.kv_dtype].itemsize
        sizes = [num_tokens * layer.kv_elements * item for layer in self.layers]
        if num_tokens < 0 or data.dtype != np.uint8 or data.shape != (sum(sizes),):
            raise BackendError(f"import: {num_tokens} tokens take uint8 ({sum(sizes)},), not {data.dtype} {data.shape}")
        parts = [
            _from_token_bytes(part, layer, num_tokens, self.kv_dtype)
            for part, layer in zip(np.split(data, np.cumsum(sizes)[:-1]), self.layers, strict=True)
        ]
        new = [keys for keys, _ in parts], [values for _, values in parts]
        if start:
            old = self.cached[sequence_id]
            new = tuple(
                [np.concatenate(pair) for pair in zip(*both, strict=True)]
                for both in zip((old.keys, old.values), new, strict=True)
            )
        self.cached[sequence_id] = _Cached(start + num_tokens, *new)

    def store(self, job_id: int, layer: int, start: int, k: np.ndarray, v: np.ndarray) -> None:
        """Store rows [num_rows, num_kv_heads, dim], float32, of an incoming sequence, as a KV port does."""
        job = self.incoming[job_id]
        sequence = self.cached[job.sequence_id]
        rows = {(layer, token) for token in range(start, start + len(k))}
        if not rows <= job.missing:
            raise BackendError(f"store: rows of job {job_id} that came before, or do not belong to it")
        job.missing -= rows
        for cache, new in ((sequence.keys, k), (sequence.values, v)):
            whole = np.zeros((job.num_tokens, *new.shape[1:]), np.float32)
            whole[: len(cache[layer])] = cache[layer]
            whole[start : start + len(new)] = new
            cache[layer] = whole

    def admit(self, vacant: Sequence[int] = ()) -> dict[int, RWorkerInfo]:
        """See ``AttentionBackend.admit``: always empty."""
        return {}

    def dismiss(self, worker: int) -> None:
        """See ``AttentionBackend.dismiss``; no effect, since sequences are not kept per R-worker."""

    def close(self) -> None:
        self.cached.clear()

    def _check_between_steps(self, worker: int, what: str) -> None:
        if self._in_step:
            raise BackendError(f"{what}: a step is open")
        if not 0 <= worker < self.num_workers:
            raise BackendError(f"{what}: there is no R-worker {worker}; there are {self.num_workers}")

    def _apply(self, verb: int, sequence_id: int, source_id: int, num_tokens: int) -> None:
        if verb == Verb.FORK:
            self.cached[sequence_id] = self.cached[source_id].first(num_tokens)
        elif verb == Verb.TRUNCATE:
            self.cached[sequence_id] = self.cached[sequence_id].first(num_tokens)
        elif verb == Verb.RESERVE:
            self._reserve(sequence_id, source_id, num_tokens)
        elif verb == Verb.COMMIT:
            self._commit(sequence_id, source_id, num_tokens)
        else:
            del self.cached[sequence_id]
            self.incoming = {i: job for i, job in self.incoming.items() if job.sequence_id != sequence_id}

    def _reserve(self, sequence_id: int, job_id: int, num_tokens: int) -> None:
        context_len = self.cached.setdefault(sequence_id, self._empty()).num_tokens
        if job_id in self.incoming or num_tokens <= context_len:
            raise BackendError(f"reserve: job {job_id} of sequence {sequence_id}, {context_len} to {num_tokens} tokens")
        tokens = range(context_len, num_tokens)
        missing = {(layer, token) for layer in range(len(self.layers)) for token in tokens}
        self.incoming[job_id] = _Incoming(sequence_id, num_tokens, missing)

    def _commit(self, sequence_id: int, job_id: int, num_tokens: int) -> None:
        job = self.incoming.pop(job_id)
        if job.missing or (job.sequence_id, job.num_tokens) != (sequence_id, num_tokens):
            raise BackendError(f"commit: job {job_id} of sequence {sequence_id}: {len(job.missing)} rows are missing")
        self.cached[sequence_id].num_tokens = num_tokens

    def _empty(self) -> _Cached:
        keys = [np.zeros((0, layer.num_kv_heads, layer.key_head_dim), np.float32) for layer in self.layers]
        values = [np.zeros((0, layer.num_kv_heads, layer.value_head_dim), np.float32) for layer in self.layers]
        return _Cached(0, keys, values)


def attend_row(q: np.ndarray, keys: np.ndarray, values: np.ndarray, position: int, layer: Layer) -> np.ndarray:
    """Return o [num_heads, dim] for q [num_heads, dim] at ``position``, over [tokens, num_kv_heads, dim]."""
    first = max(0, position + 1 - layer.window) if layer.window else 0
    first = position - position % layer.window if layer.chunked else first
    group = layer.num_heads // layer.num_kv_heads
    seen_keys = np.repeat(keys[first : position + 1], group, axis=1).astype(np.float64)
    seen_values = np.repeat(values[first : position + 1], group, axis=1)
    scores = np.einsum("hd,thd->ht", q, seen_keys) * layer.scale
    if layer.soft_cap:
        scores = layer.soft_cap * np.tanh(scores / layer.soft_cap)
    if layer.alibi_slopes:
        scores = scores + np.outer(layer.alibi_slopes, np.arange(first - position, 1))
    sinks = np.array(layer.sinks)[:, None] if layer.sinks else np.full((layer.num_heads, 1), -np.inf)
    top = np.maximum(scores.max(axis=1, keepdims=True), sinks)
    weights = np.exp(scores - top)
    weights /= weights.sum(axis=1, keepdims=True) + np.exp(sinks - top)
    return np.einsum("ht,thd->hd", weights, seen_values).astype(np.float32)


def _token_bytes(keys: np.ndarray, values: np.ndarray, kv_dtype: str) -> np.ndarray:
    """Return one layer's part of an export."""
    flat = [part.reshape(len(part), part.shape[1] * part.shape[2]) for part in (keys, values)]
    rows = np.concatenate(flat, axis=1)
    return to_wire(rows, kv_dtype).view(np.uint8).reshape(-1)


def _from_token_bytes(data: np.ndarray, layer: Layer, num_tokens: int, kv_dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Return keys and values from one layer's part of an export."""
    rows = from_wire(data.copy().view(WIRE_DTYPE[kv_dtype]), kv_dtype).reshape(num_tokens, layer.kv_elements)
    keys, values = np.split(rows, [layer.num_kv_heads * layer.key_head_dim], axis=1)
    return (
        keys.reshape(num_tokens, layer.num_kv_heads, layer.key_head_dim),
        values.reshape(num_tokens, layer.num_kv_heads, layer.value_head_dim),
    )
