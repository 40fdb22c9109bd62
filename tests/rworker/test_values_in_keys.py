"""Values that are the first dims of the keys are not stored, and have the bits of values that are.

Caches of int8 and int4 give the bits of a float cache of the rows that they keep.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest

from fastdecode import _rworker
from fastdecode.kinds import Dense, Latent

from .harness import FORK, RELEASE, TRUNCATE, Layer, table
from .oracle import from_bits, rounded, to_bits
from .quantised import QUANTISED, exported, stored

APPEND, ATTEND, PARTIAL, READ = range(4)
ISAS = _rworker.supported_isas()
DEEPSEEK = Layer(3, 1, 576, 512, 0.07)
DOTS = Layer(2, 1, 1088, 1024, 0.06, window=500)
ODD = Layer(6, 2, 41, 23, 0.2, window=600, soft_cap=5.0, sinks=(0.5, -1.0, 0.0, 1.0, 0.25, 2.0))


def in_keys(layer: Dense) -> Latent:
    """Return the same layer with values that are the first dims of the keys."""
    return Latent(**msgspec.structs.asdict(layer))


@dataclass
class Pair:
    """Two R-workers with the same requests.

    One keeps values apart, or floats in place of codes. Sequences are numbered from 1.
    """

    layer: Dense
    dtype: str = "float32"
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        settings = {"block_size": 32, "num_blocks": 200, "num_threads": 1, "isa": "auto"} | self.options
        self.kv_dtype = settings.setdefault("kv_dtype", self.dtype)
        settings["model_dtype"] = self.dtype
        is_quantized = self.kv_dtype in QUANTISED
        self.workers = [
            _rworker.RWorker(
                layers=[in_keys(self.layer) if is_quantized else self.layer], **settings | {"kv_dtype": self.dtype}
            ),
            _rworker.RWorker(layers=[in_keys(self.layer)], **settings),
        ]
        self.rng = np.random.default_rng(7)

    def rows(self, heads: int, num_rows: int) -> np.ndarray:
        return to_bits(
            self.rng.standard_normal((num_rows, heads, self.layer.key_head_dim), dtype=np.float32), self.dtype
        )

    def payloads(self, k: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return keys and values for each R-worker."""
        dim, shared = self.layer.value_head_dim, (k, np.ascontiguousarray(k[..., :0]))
        if self.kv_dtype not in QUANTISED:
            return [(k, np.ascontiguousarray(k[..., :dim])), shared]
        kept = self.kept(from_bits(k, self.dtype))
        return [(to_bits(kept, self.dtype), shared[1]), shared]

    def kept(self, rows: np.ndarray) -> np.ndarray:
        """Return float32 ``rows`` of keys as a cache of codes keeps them."""
        dim = self.layer.value_head_dim
        values = stored(np.ascontiguousarray(rows[..., :dim]), self.kv_dtype, keys=False)
        return np.concatenate([values, rounded(np.ascontiguousarray(rows[..., dim:]), "bfloat16")], axis=-1)

    def step(self, spans: list[tuple[int, int, int, int]], controls: Any = ()) -> list[np.ndarray]:
        """Run random rows for the spans (sequence, context, rows, mode); return o and partials, equal in both."""
        modes, dim = [mode for *_, mode in spans], self.layer.value_head_dim
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
        for worker, (keys, values) in zip(self.workers, self.payloads(k), strict=True):
            o = np.full((num_out, self.layer.num_heads, dim), 7, q.dtype)
            partials = np.zeros((num_nodes, self.layer.num_heads, 2 + dim), np.float32)
            worker.begin_step(table(list(controls)), [table(spans)])
            worker.run(0, 0, q, keys, values, o, partials if {PARTIAL, READ} & set(modes) else None)
            worker.end_step()
            answers.append((o, partials))
        for apart, shared in zip(*answers, strict=True):
            assert np.array_equal(apart.view(np.uint8), shared.view(np.uint8))
        return list(answers[1])


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [("float32", "float32"), ("float16", "float16"), ("bfloat16", "bfloat16")]
    + [("float32", "int8"), ("bfloat16", "int4")]
    + [pytest.param(*dtypes, marks=pytest.mark.thorough) for dtypes in [("float16", "int8"), ("float32", "int4")]],
)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("layer", [ODD, DEEPSEEK, DOTS], ids=["odd", "deepseek", "dots"])
def test_bits_of_values_stored_apart(layer: Layer, isa: str, dtype: str, kv_dtype: str) -> None:
    """Prompts, decodes, forks, cuts within tiles, closed ranges and tails give the same bits."""
    pair = Pair(layer, dtype, {"isa": isa, "kv_dtype": kv_dtype})
    pair.step([(2, 0, 1, ATTEND), (1, 0, 465, APPEND), (3, 0, 512, APPEND)])
    pair.step([(1, 465, 60, ATTEND), (2, 1, 1, ATTEND)])
    for length in range(525, 531):
        pair.step([(1, length, 1, ATTEND), (2, length - 523, 1, ATTEND)])
    pair.step([(4, 523, 3, ATTEND), (1, 531, 1, ATTEND)], [(FORK, 4, 1, 523)])
    pair.step([(3, 512, 2, READ), (4, 517, 2, ATTEND), (2, 8, 2, PARTIAL)], [(TRUNCATE, 4, 0, 517)])
    # The rows of other sequences still lie there.
    pair.step([(5, 0, 30, ATTEND)], [(RELEASE, 1, 0, 0), (RELEASE, 4, 0, 0)])
    assert pair.workers[1].statistics()["bytes_read"] < pair.workers[0].statistics()["bytes_read"]


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int4"])
def test_a_chunk_that_threads_share_has_the_bits_of_its_rows(kv_dtype: str) -> None:
    """A chunk over a split's border, on three threads, has the bits of its rows one by one on one thread."""
    layer, rng = Latent(64, 1, 40, 32, 0.2), np.random.default_rng(3)
    q, k = (to_bits(rng.standard_normal((530, heads, 40), dtype=np.float32), "bfloat16") for heads in (64, 1))
    results = []
    for threads, sizes in ((3, [40]), (1, [1] * 40)):
        settings = {"block_size": 32, "num_blocks": 20, "num_threads": threads, "kv_dtype": kv_dtype}
        worker = _rworker.RWorker(layers=[layer], model_dtype="bfloat16", **settings)
        out = np.zeros((530, 64, 32), np.uint16)
        for end, size in zip(np.cumsum([490, *sizes]).tolist(), [490, *sizes], strict=True):
            part = slice(end - size, end)
            worker.begin_step(table([]), [table([(1, end - size, size, ATTEND)])])
            worker.run(0, 0, q[part], k[part], np.ascontiguousarray(k[part, :, :0]), out[part])
            worker.end_step()
        results.append(out)
    assert results[0][490:].any() and np.array_equal(*results)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [("float32",) * 2, ("bfloat16",) * 2, ("float32", "int8"), ("bfloat16", "int4")]
)
def test_sequences_move_as_rows_of_keys(dtype: str, kv_dtype: str) -> None:
    """Sequences are exported, imported, and stored by prefill workers in any order."""
    pair = Pair(DEEPSEEK, dtype, {"kv_dtype": kv_dtype})
    pair.step([(1, 0, 75, ATTEND)])
    for worker in pair.workers:
        worker.import_(2, 75, worker.export(1, 0, 75))
    k = pair.rows(1, 75)
    for worker, (keys, values) in zip(pair.workers, pair.payloads(k), strict=True):
        worker.begin_step(table([(3, 3, 9, 75)]), [])
        worker.end_step()
        for start, end in ((40, 75), (0, 5), (5, 40)):
            worker.store(9, 0, start, keys[start:end].copy(), values[start:end].copy())
        worker.begin_step(table([(4, 3, 9, 75)]), [])
        worker.end_step()
    assert bytes(pair.workers[1].export(3, 0, 75)) == exported_rows(k, dtype, kv_dtype).tobytes()
    pair.step([(2, 75, 2, ATTEND), (3, 75, 3, ATTEND)])
    keys, values = pair.workers[1].read_tokens(3, 0)
    assert values.shape == (78, 1, 0)
    floats = from_bits(k, dtype)
    assert np.array_equal(keys[:75], pair.kept(floats) if kv_dtype in QUANTISED else floats)


def exported_rows(k: np.ndarray, dtype: str, kv_dtype: str) -> np.ndarray:
    """Return the bytes of DeepSeek's rows.

    They are the keys, or the values' codes with their scales and then the other dims in bfloat16.
    """
    if kv_dtype not in QUANTISED:
        return k
    rows = from_bits(k, dtype)
    codes = exported(np.ascontiguousarray(rows[..., :512]), kv_dtype, keys=False)
    if kv_dtype == "int4":  # A group's dims i and i + 32 share a byte; neighbours do not.
        pairs = codes[..., :256].reshape(*codes.shape[:-1], 8, 32)
        nibbles = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*pairs.shape[:-1], 64)
        codes[..., :256] = (nibbles[..., :32] | nibbles[..., 32:] << 4).reshape(*codes.shape[:-1], 256)
    return np.concatenate([codes, to_bits(rows[..., 512:], "bfloat16").view(np.uint8)], axis=-1)


@pytest.mark.parametrize(("kv_dtype", "row_bytes"), [("bfloat16", 1152), ("int8", 644), ("int4", 416)])
def test_a_row_takes_the_bytes_of_its_key(kv_dtype: str, row_bytes: int) -> None:
    """A row of DeepSeek-V3 takes its key's bytes and all that a block holds beside them."""
    layer = Latent(128, 1, 576, 512, 0.07)
    for block_size in (16, 64):
        assert _rworker.block_bytes([layer] * 61, kv_dtype, block_size) == 61 * row_bytes * block_size


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="values_in_keys needs keys of at least value_dim elements"):
        Pair(Layer(2, 1, 16, 32))
    with pytest.raises(ValueError, match="head dims must be 1 to 1088, not 1089"):
        Pair(Layer(2, 1, 1089, 1024), options={"kv_dtype": "int4"})
