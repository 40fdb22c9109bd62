"""A small layout and three steps on two R-workers, for tests of the backends' contract."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastdecode.cluster.pool.inproc import InprocBackend
from fastdecode.cluster.pool.spawn import SpawnBackend
from fastdecode.cluster.r_worker.host import RWorkerSize
from fastdecode.core.protocols import AttentionBackend
from fastdecode.core.types import CONTROL, SPAN, StepPlan, StepReport, Verb, WorkerPlan
from fastdecode.kinds import Dense
from fastdecode.kinds.layout import KVLayout

LAYERS = (
    Dense(4, 2, 8, 16, 0.3),
    Dense(4, 4, 16, 8, 0.3, window=9),
    Dense(4, 2, 8, 16, 0.3, soft_cap=2.0, sinks=(0.5, -0.5, 0.0, 1.0), alibi_slopes=(0.5, 0.1, 0.02, 0.0)),
)
LAYOUT = KVLayout(LAYERS, "float32", "float32")
BLOCK_SIZE = 16
Spans = Sequence[tuple[int, int, int, int]]


def inproc() -> InprocBackend:
    """Return a backend of two R-workers in this process, one thread each."""
    return InprocBackend([RWorkerSize(1 << 24, 1)] * 2, BLOCK_SIZE)


def spawn() -> SpawnBackend:
    """Return a backend of two R-worker processes."""
    return SpawnBackend([RWorkerSize(1 << 24, 1)] * 2, BLOCK_SIZE)


def plan(mini_batches: Sequence[tuple[Spans, Spans]], controls: tuple[Spans, Spans] = ((), ())) -> StepPlan:
    """Return a plan of both workers' spans in each mini-batch, and both workers' controls."""
    return StepPlan(
        tuple(
            WorkerPlan(
                np.array(list(controls[worker]), CONTROL),
                tuple(np.array(list(spans[worker]), SPAN) for spans in mini_batches),
            )
            for worker in range(2)
        )
    )


def rows(mini_batch: tuple[Spans, Spans], index: int, layer: int) -> tuple[np.ndarray, ...]:
    """Return q, k, v that depend only on sequence, position and layer."""
    parts: list[list[np.ndarray]] = [[], [], []]
    spec = LAYERS[layer]
    shapes = (4, spec.key_head_dim), (spec.num_kv_heads, spec.key_head_dim), (spec.num_kv_heads, spec.value_head_dim)
    for sequence_id, start, count, attends in (*mini_batch[0], *mini_batch[1]):
        for part, shape in enumerate(shapes):
            draw = np.random.default_rng((sequence_id, layer, part)).standard_normal((200, *shape), dtype=np.float32)
            parts[part].append(draw[start : start + count * (attends if part == 0 else 1)])
    return tuple(np.concatenate(part) for part in parts)


def run(
    backend: AttentionBackend, mini_batches: Sequence[tuple[Spans, Spans]], controls: tuple[Spans, Spans] = ((), ())
) -> tuple[list[np.ndarray], StepReport]:
    """Run a whole step, with mini-batches interleaved by layer and collected last first; return every o in order."""
    backend.begin_step(plan(mini_batches, controls))
    outputs = []
    used = [index for index, spans in enumerate(mini_batches) if spans[0] or spans[1]]
    for layer in range(len(LAYERS)):
        for index in used:
            backend.submit(index, layer, *rows(mini_batches[index], index, layer))
        outputs += [backend.collect(index).copy() for index in reversed(used)]
    return outputs, backend.end_step()


FIRST = [([(2, 0, 20, 1), (1, 0, 40, 0)], [(3, 0, 33, 1)]), ([], []), ([], [(5, 0, 1, 1)])]
SECOND = [([(1, 40, 1, 1), (2, 20, 1, 1)], [(3, 33, 1, 1)]), ([(4, 32, 1, 1)], []), ([], [(5, 1, 30, 1)])]
SECOND_CONTROLS = ([(Verb.FORK, 4, 1, 32)], [])
THIRD = [([(1, 41, 1, 1), (2, 10, 7, 1)], []), ([(4, 33, 1, 1)], [(5, 31, 1, 1)])]
THIRD_CONTROLS = ([(Verb.TRUNCATE, 2, 0, 10)], [(Verb.RELEASE, 3, 0, 0)])


def story(backend: AttentionBackend) -> list[np.ndarray]:
    """Run steps with prompts, decodes, a fork, a truncation, a release and empty mini-batches; return every o."""
    steps = (FIRST, ((), ())), (SECOND, SECOND_CONTROLS), (THIRD, THIRD_CONTROLS)
    return [o for mini_batches, controls in steps for o in run(backend, mini_batches, controls)[0]]
