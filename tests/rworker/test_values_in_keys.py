"""Values that are the first dims of the keys, and are not stored: the bits of the same values stored beside them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from fastdecode import _rworker

from .harness import FORK, RELEASE, TRUNCATE, Layer, table
from .oracle import to_bits

APPEND, ATTEND, PARTIAL, READ = range(4)
ISAS = _rworker.supported_isas()
DEEPSEEK = Layer(3, 1, 576, 512, 0.07)
ODD = Layer(6, 2, 41, 23, 0.2, window=600, soft_cap=5.0, sinks=(0.5, -1.0, 0.0, 1.0, 0.25, 2.0))


@dataclass
class Pair:
    """Two R-workers that are told the same; one keeps values apart. Sequences are numbered from 1."""

    layer: Layer
    dtype: str = "float32"
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parts = self.layer.as_tuple()
        settings = {"block_size": 32, "num_blocks": 200, "num_threads": 1, "isa": "auto"} | self.options
        dtypes = {"model_dtype": self.dtype, "kv_dtype": self.options.get("kv_dtype", self.dtype)}
        self.workers = [_rworker.RWorker(layers=[(*parts, shared)], **settings | dtypes) for shared in (False, True)]
        self.rng = np.random.default_rng(7)

    def rows(self, heads: int, num_rows: int) -> np.ndarray:
        return to_bits(self.rng.standard_normal((num_rows, heads, self.layer.key_dim), dtype=np.float32), self.dtype)

    def step(self, spans: list[tuple[int, int, int, int]], controls: Any = ()) -> list[np.ndarray]:
        """Random rows for the spans (sequence, context, rows, mode); o and partial results, which both have alike."""
        modes, dim = [mode for *_, mode in spans], self.layer.value_dim
        stored = sum(count for *_, count, mode in spans if mode != READ)
        q = self.rows(self.layer.num_heads, sum(count for *_, count, mode in spans if mode != APPEND))
        k = self.rows(self.layer.num_kv_heads, stored)
        num_out = sum(count for *_, count, mode in spans if mode == ATTEND)
        num_nodes = sum(
            count * (1 if mode == READ else ((context + count - 1) // 512 + 1).bit_count())
            for _, context, count, mode in spans
            if mode in (PARTIAL, READ)
        )
        answers = []
        for worker, values in zip(self.workers, (k[..., :dim], k[..., :0]), strict=True):
            o = np.full((num_out, self.layer.num_heads, dim), 7, q.dtype)
            partials = np.zeros((num_nodes, self.layer.num_heads, 2 + dim), np.float32)
            worker.begin_step(table(list(controls)), [table(spans)])
            worker.run(0, 0, q, k, np.ascontiguousarray(values), o, partials if {PARTIAL, READ} & set(modes) else None)
            worker.end_step()
            answers.append((o, partials))
        for apart, shared in zip(*answers, strict=True):
            assert np.array_equal(apart.view(np.uint8), shared.view(np.uint8))
        return list(answers[1])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("layer", [ODD, DEEPSEEK], ids=["odd", "deepseek"])
def test_bits_of_values_stored_apart(layer: Layer, isa: str, dtype: str) -> None:
    """Prompts and decodes, tiles that are open and full, forks and cuts within tiles, closed ranges and their tails."""
    pair = Pair(layer, dtype, {"isa": isa})
    pair.step([(2, 0, 1, ATTEND), (1, 0, 465, APPEND), (3, 0, 512, APPEND)])
    pair.step([(1, 465, 60, ATTEND), (2, 1, 1, ATTEND)])
    for length in range(525, 531):
        pair.step([(1, length, 1, ATTEND), (2, length - 523, 1, ATTEND)])
    pair.step([(4, 523, 3, ATTEND), (1, 531, 1, ATTEND)], [(FORK, 4, 1, 523)])
    pair.step([(3, 512, 2, READ), (4, 517, 2, ATTEND), (2, 8, 2, PARTIAL)], [(TRUNCATE, 4, 0, 517)])
    pair.step([(5, 0, 30, ATTEND)], [(RELEASE, 1, 0, 0), (RELEASE, 4, 0, 0)])  # where others' rows still lie
    assert pair.workers[1].statistics()["bytes_read"] < pair.workers[0].statistics()["bytes_read"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sequences_move_as_rows_of_keys(dtype: str) -> None:
    """Exported, imported, and stored by prefill workers in any order."""
    pair = Pair(DEEPSEEK, dtype)
    pair.step([(1, 0, 75, ATTEND)])
    row_bytes = 576 * (4 if dtype == "float32" else 2)
    exported = [worker.export(1, 0, 75) for worker in pair.workers]
    assert len(exported[1]) == 75 * row_bytes and len(exported[0]) == 75 * (row_bytes + row_bytes // 9 * 8)
    for worker, data in zip(pair.workers, exported, strict=True):
        worker.import_(2, 75, data)
    k = pair.rows(1, 75)
    for worker, values in zip(pair.workers, (k[..., :512], k[..., :0]), strict=True):
        worker.begin_step(table([(3, 3, 9, 75)]), [])
        worker.end_step()
        for start, end in ((40, 75), (0, 5), (5, 40)):
            worker.store(9, 0, start, k[start:end].copy(), np.ascontiguousarray(values[start:end]))
        worker.begin_step(table([(4, 3, 9, 75)]), [])
        worker.end_step()
    pair.step([(2, 75, 2, ATTEND), (3, 75, 3, ATTEND)])
    keys, values = pair.workers[1].read_tokens(3, 0)
    assert values.shape == (78, 1, 0)
    assert np.array_equal(to_bits(keys[:75], dtype), k)


def test_a_row_takes_the_bytes_of_its_key() -> None:
    """DeepSeek-V3's in bfloat16, with all that blocks hold beside."""
    layer = (*Layer(128, 1, 576, 512, 0.07).as_tuple(), True)
    for block_size in (16, 64):
        assert _rworker.block_bytes([layer] * 61, "bfloat16", block_size) <= 1.02 * 61 * 576 * 2 * block_size


def test_what_cannot_be_is_refused() -> None:
    for layer, kv_dtype in ((Layer(2, 1, 16, 32), "float32"), (Layer(2, 1, 32, 16), "int8")):
        with pytest.raises(ValueError, match="values_in_keys needs keys of at least value_dim elements, in float32"):
            Pair(layer, options={"kv_dtype": kv_dtype})
    with pytest.raises(ValueError, match="head dims must be 1 to 512, not 576"):
        Pair(DEEPSEEK, options={"kv_dtype": "int4"})
