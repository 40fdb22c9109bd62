"""Index layers, and layers whose queries attend the picked tokens, agree with torch's top-k and the oracle."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from fastdecode import _rworker
from fastdecode.kinds import Dense, Index, Latent, Layer
from fastdecode.sworker.adapters.index import picked
from fastdecode.sworker.run.prompts import reference_attention
from fastdecode.sworker.run.staging import TORCH_DTYPE, from_numpy, to_numpy

from .harness import FORK, TRUNCATE, table

APPEND, ATTEND = range(2)
ISAS = _rworker.supported_isas()


def tokens(heads: int, dim: int, most: int) -> Layer:
    return Index(heads, dim, 0.3, picks=most)


def latent(heads: int, dim: int, value_dim: int, by: int, sinks: tuple[float, ...] = ()) -> Layer:
    return Latent(heads, 1, dim, value_dim, 0.2, picked_by=by, sinks=sinks)


def blocks(heads: int, most: int, size: int, local: int) -> Layer:
    return Index(heads, 24, 1.0, picks=most, pick_block=size, pick_local=local)


KINDS = {
    "tokens": (
        tokens(22, 24, 40),
        latent(3, 41, 23, 0),
        latent(6, 32, 32, 0, (0.5,) * 6),
        tokens(70, 17, 600),
        latent(2, 48, 32, 3),
    ),
    "blocks": (blocks(2, 4, 32, 1), Dense(6, 2, 20, 12, 0.2, picked_by=0), Dense(4, 4, 16, 16, 0.3)),
    "local": (blocks(3, 9, 128, 3), Dense(3, 3, 20, 12, 0.2, picked_by=0, soft_cap=3.0)),
}
TOLERANCE = {"float32": 3e-5, "float16": 4e-3, "bfloat16": 3e-2, "int8": 2e-2, "int4": 2e-2}


def make_worker(layers: tuple[Layer, ...], dtype: str, **settings: Any) -> _rworker.RWorker:
    """Return an R-worker of ``layers``, whose cache is in the model's dtype by default."""
    return _rworker.RWorker(layers=list(layers), **{"model_dtype": dtype, "kv_dtype": dtype} | settings)


@dataclass
class Side:
    """An R-worker and all rows it was given, by sequence and layer.

    ``step`` checks the R-worker's answers by the oracle, which gets rows as a cache of codes returns them.
    """

    layers: tuple[Layer, ...]
    dtype: str = "float32"
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        settings = {"block_size": 16, "num_blocks": 300, "num_threads": 1, "isa": "auto"} | self.options
        self.kv_dtype = settings.get("kv_dtype", self.dtype)
        self.worker = make_worker(self.layers, self.dtype, **settings)
        self.rng = np.random.default_rng(5)
        self.rows: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def random(self, *shape: int) -> torch.Tensor:
        return torch.from_numpy(self.rng.standard_normal(shape, dtype=np.float32)).to(TORCH_DTYPE[self.dtype])

    def queries(self, count: int, layer: Layer) -> torch.Tensor:
        q = self.random(count, layer.num_heads, layer.query_dim)
        if layer.query_dim > layer.key_head_dim:
            weights = torch.from_numpy(self.rng.standard_normal((count, layer.num_heads, 2), dtype=np.float32))
            bits = weights if self.dtype == "float32" else weights[..., :1].contiguous().view(q.dtype)
            q[..., layer.key_head_dim :] = bits
        return q

    def step(self, spans: list[tuple[int, int, int, int]], controls: Any = ()) -> list[np.ndarray]:
        """Run a step of random rows for the spans (sequence, context, rows, mode); return checked o of each layer."""
        self.worker.begin_step(table(list(controls)), [table(spans)])
        attending = [(each[0], each[1], each[2]) for each in spans if each[3] == ATTEND]
        answers, asked = [], []
        for number, layer in enumerate(self.layers):
            q = self.queries(sum(count for *_, count in attending), layer)
            k, v = (
                self.random(sum(each[2] for each in spans), layer.num_kv_heads, dim)
                for dim in (layer.key_head_dim, layer.stored_value_dim)
            )
            o = np.full((len(q), layer.num_heads, layer.value_head_dim), 7, to_numpy(q).dtype)
            self.worker.submit(0, number, *map(to_numpy, (q, k, v)), o)
            self.worker.wait(0)
            answers.append(o)
            asked.append(q)
            self._keep(number, spans, k, v)
        self.worker.end_step()
        seen: dict[int, torch.Tensor] = {}
        for number, (layer, q, o) in enumerate(zip(self.layers, asked, answers, strict=True)):
            found = from_numpy(o, q.dtype).split([count for *_, count in attending])
            for (sequence, context, count), own, rows in zip(
                attending, q.split([each[2] for each in attending]), found, strict=True
            ):
                keys, values = (each[: context + count] for each in self._rows_of(sequence, number))
                if layer.ranks_tokens:
                    seen[sequence] = picked(own, keys, layer)
                    assert not rows.any()
                    continue
                wanted = reference_attention(own, keys, values, layer, seen[sequence] if layer.reads >= 0 else None)
                assert (rows.float() - wanted.float()).abs().max() < TOLERANCE[self.kv_dtype], (number, sequence)
        return answers

    def _rows_of(self, sequence: int, number: int) -> tuple[torch.Tensor, ...]:
        if self.kv_dtype == self.dtype:
            return self.rows[sequence][number]
        return tuple(torch.from_numpy(each) for each in self.worker.read_tokens(sequence, number))

    def _keep(self, number: int, spans: list[tuple[int, int, int, int]], k: torch.Tensor, v: torch.Tensor) -> None:
        first = 0
        for sequence, context, count, _ in spans:
            kept = self.rows.setdefault(sequence, [])
            if number == len(kept):
                kept.append((k[:0], v[:0]))
            kept[number] = tuple(
                torch.cat((old[:context], new[first : first + count]))
                for old, new in zip(kept[number], (k, v), strict=True)
            )
            first += count


@pytest.mark.parametrize("kv_dtype", TOLERANCE)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
def test_queries_see_what_the_index_picks(kind: str, isa: str, kv_dtype: str) -> None:
    """Prompts in chunks, decodes, forks and cuts within tiles agree, with open and full tiles and several splits."""
    dtype = kv_dtype if kv_dtype in TORCH_DTYPE else "bfloat16"
    side = Side(KINDS[kind], dtype, {"isa": isa, "num_threads": 2, "kv_dtype": kv_dtype})
    side.step([(1, 0, 70, ATTEND), (2, 0, 1, ATTEND), (3, 0, 40, APPEND)])
    side.step([(2, 1, 1, ATTEND), (3, 40, 1, ATTEND), (1, 70, 590, APPEND)])
    side.step([(1, 660, 13, ATTEND)])
    side.rows[4] = list(side.rows[1])
    side.step([(1, 673, 3, ATTEND), (4, 523, 2, ATTEND)], [(FORK, 4, 1, 523)])
    side.step([(4, 519, 1, ATTEND), (1, 676, 1, ATTEND)], [(TRUNCATE, 4, 0, 519)])


def test_bits_do_not_depend_on_company_threads_or_steps() -> None:
    spans = [(1, 600, 20, ATTEND), (2, 60, 9, ATTEND)]
    for kind, layers in KINDS.items():
        answers = []
        for options in ({}, {"num_threads": 3, "block_size": 32}):
            side = Side(layers, options=options)
            side.step([(1, 0, 600, APPEND), (2, 0, 60, APPEND)])
            answers.append(side.step(spans))
        assert all(np.array_equal(*each) for each in zip(*answers, strict=True)), kind


def test_equal_scores_go_to_the_earlier_and_nan_harms_nobody() -> None:
    """The earlier of equal scores is picked, and a head's weight of NaN or -inf leaves all outputs finite."""
    index, layer = tokens(1, 16, 4), Latent(1, 1, 16, 16, 1.0, picked_by=0)
    worker = make_worker((index, layer), "float32", block_size=16, num_blocks=8, num_threads=1)
    k = np.zeros((10, 1, 16), np.float32)
    k[:, 0, 0] = [3, 1, 1, 5, 1, 1, 1, 0, 1, 1]
    rows = np.arange(10, dtype=np.float32)[:, None, None] * np.ones((1, 1, 16), np.float32)
    for bad in (None, np.nan, -np.inf):
        worker.begin_step(table([(2, 1, 0, 0)] if bad else []), [table([(1, 0, 10, ATTEND)])])
        q = np.zeros((10, 1, 18), np.float32)
        q[:, 0, 0], q[:, 0, 16] = 1, 1 if bad is None else bad
        o = np.zeros((10, 1, 1), np.float32)
        worker.run(0, 0, q, k, k[..., :0], o)
        o = np.zeros((10, 1, 16), np.float32)
        worker.run(0, 1, np.zeros((10, 1, 16), np.float32), rows, rows[..., :0], o)
        worker.end_step()
        assert np.isfinite(o).all()
        if bad is None:
            assert np.allclose(o[9], (0 + 1 + 2 + 3) / 4)


def test_an_abandoned_step_leaves_nothing_and_a_move_keeps_all() -> None:
    for layers, kv_dtype in zip(KINDS.values(), ("int4", "float32", "int8"), strict=True):
        dtype = kv_dtype if kv_dtype in TORCH_DTYPE else "bfloat16"  # No instruction set rounds queries of this dtype.
        side, other = (Side(layers, dtype, {"block_size": size, "kv_dtype": kv_dtype}) for size in (16, 32))
        side.step([(1, 0, 77, ATTEND)])
        side.worker.begin_step(table([]), [table([(1, 77, 5, ATTEND)])])
        for number, layer in enumerate(layers):
            q, k, v = (
                side.queries(5, layer),
                side.random(5, layer.num_kv_heads, layer.key_head_dim),
                side.random(5, layer.num_kv_heads, layer.stored_value_dim),
            )
            q, k, v = map(to_numpy, (q, k, v))
            side.worker.run(0, number, q, k, v, np.zeros((5, layer.num_heads, layer.value_head_dim), q.dtype))
        side.worker.abandon_step()
        other.worker.import_(1, 77, side.worker.export(1, 0, 77))
        other.rows = {1: list(side.rows[1])}
        for each in (side, other):
            each.step([(1, 77, 4, ATTEND)])
        assert np.array_equal(side.worker.export(1, 0, 77), other.worker.export(1, 0, 77))


def test_what_is_read_is_counted() -> None:
    """The bytes read are those of the picked latent rows and of all the index's keys."""
    side = Side(KINDS["tokens"][:2])
    side.step([(1, 0, 400, APPEND)])
    before = side.worker.statistics()["bytes_read"]
    side.step([(1, 400, 1, ATTEND)])
    assert side.worker.statistics()["bytes_read"] - before == 401 * 24 * 4 + 40 * 41 * 4


def test_what_cannot_be_is_refused() -> None:
    index, layer = KINDS["tokens"][:2]
    block, wide = KINDS["blocks"][:2]
    for layers, message in (
        ((layer, index), "picked_by must be the last layer before it that picks"),
        (
            (index, Dense(2, 1, 16, 16, 1.0, picked_by=0)),
            "where tokens are picked one KV head and values_in_keys",
        ),
        ((block, Dense(3, 3, 16, 16, 1.0, picked_by=0)), "as many KV heads as that one has heads"),
        ((blocks(2, 4, 24, 1), wide), "pick_block is 24; it must be 0, or a power of two"),
        ((blocks(2, 4, 32, 5), wide), "with a pick_local of 1 to picks"),
        ((Index(2, 16, 1.0, picks=0),), "picks must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            Side(layers)
    with pytest.raises(ValueError, match="and a multiple of block_size \\(64\\)"):
        Side(KINDS["blocks"], options={"block_size": 64})
    side = Side((index, layer))
    side.worker.begin_step(table([]), [table([(1, 0, 1, ATTEND)])])
    q, k = np.zeros((1, 3, 41), np.float32), np.zeros((1, 1, 41), np.float32)
    with pytest.raises(ValueError, match="layer 1 reads what layer 0 picks, which was not submitted just before"):
        side.worker.submit(0, 1, q, k, k[..., :0], np.zeros((1, 3, 23), np.float32))
