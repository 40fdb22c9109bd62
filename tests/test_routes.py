"""The rows of each R-worker, against a recount row by row: ranges, copies, prompts, drafts, and losses in a step."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from doubles.labelling_worker import Kept, LabellingWorker

from fastdecode.cluster.pool.backend import PoolBackend
from fastdecode.cluster.pool.worker import LostWorker
from fastdecode.core.errors import BackendError, WorkerLostError
from fastdecode.core.routes import is_empty, routes_of_spans
from fastdecode.core.step import Chunk, MiniBatch, ScheduledStep
from fastdecode.core.types import CONTROL, SPAN, MiniBatchRoutes, Rows, SpanMode, StepPlan, WorkerPlan
from fastdecode.kinds import Dense
from fastdecode.kinds.layout import KVLayout

LAYOUT = KVLayout((Dense(4, 2, 8, 6, 0.3), Dense(2, 1, 8, 8, 0.3)), "float32", "float32")
RANGE_TOKENS = 1024
NUM_ROUNDS = 300


def random_chunk(rng: random.Random, sequence_id: int, num_workers: int) -> Chunk:
    """Draw a decode, drafts or a prompt, of a short sequence or one in ranges, with one or two copies."""
    worker = rng.randrange(num_workers)
    others = [each for each in range(num_workers) if each != worker]
    num_closed, num_rows, is_decode = rng.choice([0, 0, 0, 1, 2, 3]), rng.choice([1, 1, 1, 2, 5]), rng.random() < 0.7
    base, attends = num_closed * RANGE_TOKENS, is_decode or rng.random() < 0.5
    in_window = range(rng.randrange(num_closed + 1) if rng.random() < 0.2 else 0, num_closed)
    reads = [(rng.randrange(num_workers), 1000 * sequence_id + i, i * RANGE_TOKENS) for i in in_window if attends]
    return Chunk(
        sequence_id,
        worker,
        base + rng.randrange(RANGE_TOKENS - num_rows),
        [sequence_id] * num_rows,
        attends,
        is_decode=is_decode,
        base=base,
        cache_id=rng.choice([None, 500 + sequence_id]),
        reads=tuple(reads),
        copy=rng.choice(others) if others and rng.random() < 0.4 else -1,
    )


def random_step(rng: random.Random, plain: bool = False) -> ScheduledStep:
    """Draw one to three mini-batches on one to four R-workers; ``plain``: no ranges and no second copies."""
    num_workers, parts = rng.randrange(1, 5), []
    for index in range(rng.randrange(1, 4)):
        chunks = [random_chunk(rng, 20 * index + i, num_workers) for i in range(rng.randrange(9))]
        if plain:
            chunks = [each for each in chunks if each.base == 0 and each.copy < 0]
        parts.append(MiniBatch.sorted([MiniBatch.of(chunks)]))
    return ScheduledStep(tuple(parts), ((),) * num_workers)


class Row:
    """One token of a mini-batch, its place among all rows and, where it attends, its place in q and o."""

    def __init__(self, chunk: Chunk, place: int, stored: int, attending: int) -> None:
        self.chunk, self.place, self.stored = chunk, place, stored
        self.attending = attending if chunk.attends else -1

    @property
    def cache_id(self) -> int:
        """The id of the sequence on R-workers."""
        return self.chunk.sequence_id if self.chunk.cache_id is None else self.chunk.cache_id

    @property
    def workers(self) -> set[int]:
        """The R-workers that contribute to the row's o."""
        return {self.chunk.worker, *(worker for worker, _, _ in self.chunk.reads)}


def rows_of(mini_batch: MiniBatch) -> list[Row]:
    rows: list[Row] = []
    attending = 0
    for chunk in mini_batch:
        for place in range(len(chunk.token_ids)):
            rows.append(Row(chunk, place, len(rows), attending))
            attending += chunk.attends
    return rows


def queries(rows: list[Row], worker: int) -> list[int]:
    """Return an R-worker's rows of q: those of its closed ranges, then those of its own sequences."""
    reads = []
    for number, first in enumerate(rows):
        if first.place == 0:
            rest = rows[number : number + len(first.chunk.token_ids)]
            reads += [row.attending for other, _, _ in first.chunk.reads if other == worker for row in rest]
    return reads + [row.attending for row in rows if row.chunk.worker == worker and row.chunk.attends]


def stored(rows: list[Row], worker: int) -> list[int]:
    """Return an R-worker's rows of k and v: those of its own sequences, then those of second copies."""
    own = [row.stored for row in rows if row.chunk.worker == worker]
    return own + [row.stored for row in rows if row.chunk.copy == worker]


def listed(rows: Rows) -> list[int]:
    return list(range(rows.start, rows.stop)) if isinstance(rows, slice) else rows.tolist()


def assert_merged(routes: MiniBatchRoutes, rows: list[Row]) -> None:
    """Assert that each row in ranges is merged once, from all splits, and each partial result used once."""
    used: set[tuple[int, int]] = set()
    merged = []
    for first, num_rows, first_part, num_parts in routes.merge.merged.tolist():
        for i in range(num_rows):
            row = next(each for each in rows if each.attending == first + i)
            merged.append(row.attending)
            start = row.chunk.reads[0][2] if row.chunk.reads else row.chunk.base
            split = start // 512
            for worker, partial, stride, at, width in routes.merge.parts[first_part:][:num_parts].tolist():
                assert at == split and worker in row.workers
                assert 0 <= partial + i * stride < routes.workers[worker].num_partials
                assert (worker, partial + i * stride) not in used
                used.add((worker, partial + i * stride))
                split += width
            end = row.chunk.context_len + len(row.chunk.token_ids)
            assert split == -(-end // 512)
    assert merged == [row.attending for row in rows if row.chunk.attends and row.chunk.base]
    assert len(used) == sum(route.num_partials for route in routes.workers)


def steps(plain: bool = False) -> Iterator[tuple[random.Random, ScheduledStep]]:
    for seed in range(NUM_ROUNDS):
        rng = random.Random(seed)
        yield rng, random_step(rng, plain)


def test_routes_are_those_of_a_recount() -> None:
    num_copied_tails = 0
    for _, step in steps():
        for mini_batch, routes in zip(step.mini_batches, step.to_step_plan().routes, strict=True):
            rows = rows_of(mini_batch)
            for worker, route in enumerate(routes.workers):
                assert listed(route.q_rows) == queries(rows, worker)
                assert listed(route.kv_rows) == stored(rows, worker)
                own = [row for row in rows if row.chunk.worker == worker and row.chunk.attends]
                assert listed(route.o_rows) == [row.attending for row in own if not row.chunk.base]
                assert is_empty(route) == (not queries(rows, worker) + stored(rows, worker))
            for worker, route in enumerate(routes.recurrent() if routes.recurrent else ()):
                own = [row.attending for row in rows if row.chunk.worker == worker and row.chunk.attends]
                assert listed(route.q_rows) == listed(route.o_rows) == own
                assert listed(route.kv_rows) == stored(rows, worker)
            assert_merged(routes, rows)
            num_copied_tails += sum(row.chunk.base > 0 <= row.chunk.copy for row in rows)
    assert num_copied_tails > 100


def test_consecutive_rows_are_slices() -> None:
    """A plan that was written by hand says nothing of rows, and still gives slices."""
    for _, step in steps(plain=True):
        plan = step.to_step_plan()
        for mine, derived in zip(plan.routes, routes_of_spans(plan.workers), strict=True):
            assert list(map(vars, mine.workers)) == list(map(vars, derived.workers))
            assert not len(mine.merge.merged)
            assert all(isinstance(each, slice) for route in mine.workers for each in (route.q_rows, route.kv_rows))
    chunks = [Chunk(0, 0, 5, (1,), copy=1), Chunk(1, 1, 5, (2, 3), copy=0)]
    (routes,) = ScheduledStep((MiniBatch.of(chunks),), ((), ())).to_step_plan().routes
    assert routes.workers[0].kv_rows == slice(0, 3)
    assert listed(routes.workers[1].kv_rows) == [1, 2, 0] and not isinstance(routes.workers[1].kv_rows, slice)


@pytest.mark.parametrize("mode", [SpanMode.READ, SpanMode.PARTIAL])
def test_ranges_must_say_whose_rows_they_are(mode: SpanMode) -> None:
    spans = np.array([(1, 512, 1, mode)], SPAN)
    with pytest.raises(BackendError, match="READ or PARTIAL spans must say which rows"):
        routes_of_spans([WorkerPlan(np.zeros(0, CONTROL), (spans,))])


def labelled(rows: list[Row], layer: int) -> list[np.ndarray]:
    """Return q, k and v; a row's label is its number, 100 more in k and 200 more in v."""
    spec = LAYOUT.layers[layer]
    q, k = [row.attending for row in rows if row.chunk.attends], [row.stored for row in rows]
    shapes = ((q, 0, spec.num_heads, spec.key_head_dim), (k, 100, spec.num_kv_heads, spec.key_head_dim))
    parts = (*shapes, (k, 200, spec.num_kv_heads, spec.value_head_dim))
    return [
        np.repeat(np.array(labels, np.float32) + more, heads * dim).reshape(len(labels), heads, dim)
        for labels, more, heads, dim in parts
    ]


def kept_by(rows: list[Row], worker: int) -> list[Kept]:
    """Return what an R-worker has to store in a layer, in any order; places count from the range's first token."""
    return [
        Kept(row.cache_id, row.chunk.context_len - row.chunk.base + row.place, row.stored + 100.0, row.stored + 200.0)
        for row in rows
        if worker in (row.chunk.worker, row.chunk.copy)
    ]


def asked_of(rows: list[Row], worker: int) -> list[tuple[int, float]]:
    """Return the queries that an R-worker answers in a layer, in any order, each with its sequence."""
    own = [(row.cache_id, float(row.attending)) for row in rows if row.chunk.worker == worker and row.chunk.attends]
    return own + [(read[1], float(row.attending)) for row in rows for read in row.chunk.reads if read[0] == worker]


def test_each_row_gets_what_is_asked_for_it() -> None:
    """R-workers answer through the pool with the labels of their queries."""
    for _, step in steps():
        workers = [LabellingWorker(str(index)) for index in range(len(step.controls))]
        backend = PoolBackend(workers)
        backend.open(LAYOUT)
        backend.begin_step(step.to_step_plan())
        every = [rows_of(mini_batch) for mini_batch in step.mini_batches]
        for layer in range(len(LAYOUT.layers)):
            for index, rows in enumerate(every):
                backend.submit(index, layer, *labelled(rows, layer))
            for index, rows in enumerate(every):
                assert backend.collect(index)[:, 0, 0].tolist() == [r.attending for r in rows if r.chunk.attends]
            for worker, each in enumerate(workers):
                assert sorted(each.kept) == sorted(row for rows in every for row in kept_by(rows, worker))
                assert sorted(each.asked) == sorted(row for rows in every for row in asked_of(rows, worker))
                each.kept.clear()
                each.asked.clear()
        backend.end_step()
        backend.close()


def test_losses_zero_the_rows_that_the_lost_had_a_part_in() -> None:
    """Any call of any R-worker may be its last, and the rows of the others are unchanged."""
    num_lost, num_zeros, num_others = 0, 0, 0
    for rng, step in steps():
        workers = [LabellingWorker(str(index), last_call=rng.randrange(1, 60)) for index in range(len(step.controls))]
        backend = PoolBackend(workers)
        backend.open(LAYOUT)
        try:
            backend.begin_step(step.to_step_plan())
            every = [rows_of(mini_batch) for mini_batch in step.mini_batches]
            for layer in range(len(LAYOUT.layers)):
                for index, rows in enumerate(every):
                    backend.submit(index, layer, *labelled(rows, layer))
                for index, rows in enumerate(every):
                    o = backend.collect(index)
                    lost = {i for i, each in enumerate(backend.workers) if isinstance(each, LostWorker)}
                    attending = [row for row in rows if row.chunk.attends]
                    wanted = [0 if row.workers & lost else row.attending for row in attending]
                    assert (o == np.array(wanted, np.float32)[:, None, None]).all() and len(o) == len(wanted)
                    num_zeros += sum(bool(row.workers & lost) for row in attending)
                    num_others += sum(not row.workers & lost for row in attending) if lost else 0
            num_lost += len(backend.end_step().lost)
        except WorkerLostError as error:
            assert "no other R-worker is left" in str(error)
        backend.close()
    assert num_lost > 100 and num_zeros > 300 and num_others > 300


def test_a_step_without_rows() -> None:
    """A plan has mini-batches without rows, and another has no mini-batches."""
    backend = PoolBackend([LabellingWorker("0"), LabellingWorker("1")])
    backend.open(LAYOUT)
    backend.begin_step(ScheduledStep((MiniBatch.of([]),), ((), ())).to_step_plan())
    backend.submit(0, 0, *labelled([], 0))
    assert backend.collect(0).shape == (0, 4, 6)
    backend.end_step()
    backend.begin_step(StepPlan((WorkerPlan(np.zeros(0, CONTROL), ()),) * 2))
    backend.end_step()
    backend.close()
