"""Index layers over ranges pick what one R-worker that holds the whole sequence picks."""

from __future__ import annotations

import numpy as np
import pytest

from fastdecode import _rworker
from fastdecode.cluster.pool.inproc import InprocBackend
from fastdecode.cluster.r_worker.host import RWorkerSize
from fastdecode.core.errors import WorkerLostError
from fastdecode.core.step import Chunk, MiniBatch, ScheduledStep
from fastdecode.kinds import Dense, Index, Latent, Layer
from fastdecode.kinds.layout import KVLayout

RANGE, NUM_CLOSED, TAIL = 512, 3, 70
WHOLE, CUT = 7, 1
KINDS = {
    "tokens": (
        Index(3, 8, 0.5, picks=40),
        Latent(2, 1, 24, 16, 0.3, picked_by=0),
        Latent(2, 1, 24, 16, 0.2, picked_by=0, sinks=(0.5, -1.0)),
        Index(2, 16, 0.5, picks=700),
        Latent(2, 1, 24, 16, 0.3, picked_by=3),
    ),
    "blocks": (
        Index(2, 16, 1.0, picks=5, pick_block=32, pick_local=3),
        Dense(4, 2, 16, 8, 0.3, picked_by=0),
        Dense(2, 2, 16, 8, 0.3),
    ),
}


class Both:
    """A pool that holds a sequence as a whole and in ranges; ``places`` are R-workers of ranges and of the tail."""

    def __init__(self, layers: tuple[Layer, ...], places: list[int], ties: bool = False) -> None:
        self.layers, self.places, self.ties = layers, places, ties
        self.rng = np.random.default_rng(3)
        self.pool = InprocBackend([RWorkerSize(1 << 22, 1)] * (max(places) + 1), 16)
        self.pool.open(KVLayout(layers, "float32", "float32"))
        self.length = 0
        for index in range(NUM_CLOSED + 1):
            self.step(RANGE if index < NUM_CLOSED else TAIL, attends=False)

    def step(self, count: int, attends: bool = True) -> list[tuple[np.ndarray, np.ndarray]]:
        """Run random next tokens of both; return o of each layer, of the whole sequence and of the ranges."""
        tail = min(self.length // RANGE, NUM_CLOSED)
        reads = tuple((self.places[i], 100 + i, i * RANGE) for i in range(tail)) if attends else ()
        tokens = [0] * count
        cut = Chunk(
            CUT, self.places[tail], self.length, tokens, attends, base=tail * RANGE, cache_id=100 + tail, reads=reads
        )
        parts = [MiniBatch.of([each]) for each in (Chunk(WHOLE, 0, self.length, tokens, attends), cut)]
        batch = MiniBatch.sorted(parts)
        self.pool.begin_step(ScheduledStep((batch,), ((),) * (max(self.places) + 1)).to_step_plan())
        found = []
        for number, layer in enumerate(self.layers):
            q, k, v = (
                np.tile(self.rows(count * asked, *shape, number), (2, 1, 1))
                for asked, shape in zip((attends, 1, 1), layer.row_shapes, strict=False)
            )
            if layer.query_dim > layer.key_head_dim:
                q[..., layer.key_head_dim :] = np.abs(q[..., layer.key_head_dim :])
            self.pool.submit(0, number, q, k, v)
            o = self.pool.collect(0).copy()
            if attends and not layer.ranks_tokens:
                found.append((o[:count], o[count:]))
        self.pool.end_step()
        self.length += count
        return found

    def rows(self, count: int, heads: int, dim: int, number: int) -> np.ndarray:
        """Return random rows; with ``ties``, an index layer's numbers give many equal scores."""
        if self.ties and self.layers[number].ranks_tokens:
            return self.rng.integers(0, 2, (count, heads, dim)).astype(np.float32)
        return self.rng.standard_normal((count, heads, dim), np.float32)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_ranges_pick_what_the_whole_picks(kind: str, ties: bool) -> None:
    """Only the order of the sums over picked tokens differs, and the same ranges give the same bits anywhere."""
    answers = []
    for places in ([0, 0, 0, 0], [0, 1, 2, 1]):
        both = Both(KINDS[kind], places, ties)
        answers.append([each for count in (1, 5, 30) for each in both.step(count)])
        both.pool.close()
        for whole, cut in answers[-1]:
            np.testing.assert_allclose(cut, whole, atol=3e-6)
    for one, many in zip(*answers, strict=True):
        np.testing.assert_array_equal(many, one)


@pytest.mark.parametrize("call", ["submit", "share"])
def test_a_lost_range_leaves_the_others_going(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of the lost range read zeros, and those of the whole sequence are unchanged."""
    both = Both(KINDS["tokens"], [0, 1, 2, 0])

    def lose(*_: object) -> None:
        raise WorkerLostError("it is lost")

    monkeypatch.setattr(both.pool.workers[1], call, lose)
    for whole, cut in both.step(2):
        assert whole.any() and not cut.any()
    both.pool.close()


def test_what_is_told_of_picks_must_be_possible() -> None:
    ranks = np.array([[[9, 7, 7]], [[8, 7, 0]]], np.uint32).view(np.float32)
    parts, spans = np.array([(1, 0, 1, 0, 1), (0, 0, 1, 1, 1), (0, 1, 1, 2, 1)]), np.array([(0, 1, 0, 3)])
    assert [each.tolist() for each in _rworker.share_picks([ranks, ranks[:1]], parts, spans)] == [[[1], [1]], [[1]]]
    with pytest.raises(ValueError, match="rows that are not there"):
        _rworker.share_picks([ranks, ranks[:1]], parts, np.array([(0, 2, 0, 1)]))
    both = Both(KINDS["tokens"], [0, 0, 0, 0])
    worker = both.pool.workers[0]
    told: list[np.ndarray] = []
    worker.share = lambda mini_batch, layer, counts: told.append(counts)  # type: ignore[method-assign]
    with pytest.raises(Exception, match="was not told; share comes first"):
        both.step(1)
    del worker.share
    for counts, message in ((told[0] + 40, "0 to as many as it has ranked"), (told[0][1:], "3 counts, not 4")):
        with pytest.raises(ValueError, match=message):
            worker.share(0, 0, counts)
    both.pool.close()
