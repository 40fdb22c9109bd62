"""Tables and blocks: random operations against a model in Python that keeps whole token lists."""

from __future__ import annotations

import numpy as np
import pytest

from fastdecode import _rworker

from .harness import FORK, RELEASE, TRUNCATE, Layer, make_worker, random_rows, table

LAYER = Layer(2, 1, 8, 8, 0.3)
NUM_BLOCKS = 40


class Model:
    """The expected contents of a cache: a list of token values per sequence, and the blocks they cost."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.tokens: dict[int, list[float]] = {}
        self.shared: dict[int, list[object]] = {}  # A full block has one identity, and a partial block a fresh one.

    def copy(self) -> Model:
        model = Model(self.block_size)
        model.tokens = {i: list(tokens) for i, tokens in self.tokens.items()}
        model.shared = {i: list(blocks) for i, blocks in self.shared.items()}
        return model

    def apply(self, verb: int, sequence_id: int, source_id: int, num_tokens: int) -> None:
        if verb == RELEASE:
            del self.tokens[sequence_id], self.shared[sequence_id]
            return
        source = source_id if verb == FORK else sequence_id
        kept = self.shared[source][: num_tokens // self.block_size]
        self.tokens[sequence_id] = self.tokens[source][:num_tokens]
        if num_tokens % self.block_size:
            kept = [*kept, object()]
        self.shared[sequence_id] = kept

    def append(self, sequence_id: int, values: list[float]) -> None:
        tokens = self.tokens.setdefault(sequence_id, [])
        blocks = self.shared.setdefault(sequence_id, [])
        tokens.extend(values)
        while len(blocks) * self.block_size < len(tokens):
            blocks.append(object())

    @property
    def blocks_used(self) -> int:
        return len({id(block) for blocks in self.shared.values() for block in blocks})


def random_controls(rng: np.random.Generator, model: Model, new_id: int) -> list[tuple[int, int, int, int]]:
    """Draw up to three controls that are possible one after another, and apply them to the model."""
    controls = []
    for offset in range(int(rng.integers(0, 4))):
        ids = list(model.tokens)
        if not ids:
            break
        chosen, verb = int(rng.choice(ids)), int(rng.integers(0, 3))
        num_tokens = int(rng.integers(0, len(model.tokens[chosen]) + 1))
        target = new_id + offset if verb == FORK else chosen
        controls.append((verb, target, chosen, num_tokens))
        model.apply(*controls[-1])
    return controls


def run_step(
    worker: _rworker.RWorker, controls: list, appended: dict[int, list[float]], model: Model, commit: bool
) -> None:
    """Run one step of both; the worker's rows carry the value in every element of k and v."""
    spans = [(i, len(model.tokens.get(i, [])), len(values), 0) for i, values in appended.items()]
    values = np.array([value for values in appended.values() for value in values], np.float32)
    rows = np.broadcast_to(values[:, None, None], (len(values), 1, 8)).copy()
    none = np.zeros((0, 2, 8), np.float32)
    worker.begin_step(table(controls), [table(spans)])
    worker.submit(0, 0, none, rows, rows, none)
    if commit:
        worker.wait(0)
        worker.end_step()
    else:
        worker.abandon_step()


def check_same(worker: _rworker.RWorker, model: Model) -> None:
    assert worker.sequence_ids() == sorted(model.tokens)
    assert worker.blocks_used == model.blocks_used
    assert worker.blocks_used + worker.blocks_free == NUM_BLOCKS
    for i, tokens in model.tokens.items():
        assert worker.sequence_length(i) == len(tokens)
        assert len(worker.block_table(i)) == -(-len(tokens) // model.block_size)
        k, v = worker.read_tokens(i, 0)
        want = np.broadcast_to(np.array(tokens, np.float32).reshape(-1, 1, 1), k.shape)
        np.testing.assert_array_equal(k, want)
        np.testing.assert_array_equal(v, want)


@pytest.mark.parametrize("seed", range(12))
def test_random_operations(seed: int) -> None:
    rng = np.random.default_rng(seed)
    model = Model(int(rng.choice([16, 32])))
    worker = make_worker(LAYER, num_blocks=NUM_BLOCKS, block_size=model.block_size)
    for step in range(80):
        after_controls = model.copy()
        controls = random_controls(rng, after_controls, 10 * step)
        ids = [*(i for i in after_controls.tokens if rng.random() < 0.5), 10 * step + 9]
        appended = {i: [float(x) for x in rng.integers(1, 1000, int(rng.integers(1, 40)))] for i in ids}
        wanted = after_controls.copy()
        for i, values in appended.items():
            wanted.append(i, values)
        try:
            commit = rng.random() < 0.7
            run_step(worker, controls, appended, after_controls, commit)
            model = wanted if commit else after_controls
        except ValueError as error:
            assert "bug in the scheduler" in str(error)
            assert wanted.blocks_used > NUM_BLOCKS or controls  # Controls may need a block before they free others.
            if rng.random() < 0.8 and model.tokens:
                run_step(worker, [(RELEASE, next(iter(model.tokens)), 0, 0)], {10**6: [1.0]}, model, False)
                model.apply(RELEASE, next(iter(model.tokens)), 0, 0)
        check_same(worker, model)
    releases = [(RELEASE, i, 0, 0) for i in model.tokens]
    worker.begin_step(table(releases), [])
    worker.end_step()
    assert worker.blocks_free == NUM_BLOCKS


@pytest.mark.parametrize("block_size", [16, 64])
def test_fork_costs_a_block_only_for_a_partial_one(block_size: int) -> None:
    worker = make_worker(LAYER, block_size=block_size)
    run_step(worker, [], {1: [1.0] * (3 * block_size)}, Model(block_size), True)
    for number, (tokens, cost) in enumerate(
        [(0, 0), (1, 1), (block_size, 0), (block_size + 1, 1), (3 * block_size, 0)]
    ):
        before = worker.blocks_free
        worker.begin_step(table([(FORK, 10 + number, 1, tokens)]), [])
        worker.end_step()
        assert before - worker.blocks_free == cost


def test_lowest_blocks_come_first_and_are_reused() -> None:
    worker = make_worker(LAYER)
    model = Model(16)
    run_step(worker, [], {1: [1.0] * 40}, model, True)
    assert worker.block_table(1) == [0, 1, 2]
    run_step(worker, [(RELEASE, 1, 0, 0)], {2: [1.0] * 20}, model, True)
    assert worker.block_table(2) == [0, 1]


def test_truncate_keeps_what_it_keeps() -> None:
    worker, rng = make_worker(LAYER), np.random.default_rng(0)
    rows = random_rows(rng, LAYER, 30)
    none = np.zeros((0, 2, 8), np.float32)
    worker.begin_step(table([]), [table([(1, 0, 30, 0)])])
    worker.submit(0, 0, none, rows.k, rows.v, none)
    worker.wait(0)
    worker.end_step()
    worker.begin_step(table([(TRUNCATE, 1, 0, 17)]), [])
    worker.end_step()
    np.testing.assert_array_equal(worker.read_tokens(1, 0)[0], rows.k[:17])
