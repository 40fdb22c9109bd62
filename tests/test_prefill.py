"""Prompt attention on the S-worker against formulas in torch operations and in float64 numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from fastdecode.cluster.pool.inproc import InprocBackend
from fastdecode.cluster.r_worker.host import RWorkerSize
from fastdecode.core.step import Chunk, MiniBatch
from fastdecode.kinds import Dense, Layer
from fastdecode.kinds.layout import KVLayout
from fastdecode.sworker.run import prompts
from fastdecode.sworker.run.prompt_scratch import PromptScratch
from fastdecode.sworker.run.prompts import PromptCache, prompt_attention, reference_attention
from fastdecode.sworker.run.staging import pack

LAYER = Dense(num_heads=4, num_kv_heads=4, key_head_dim=16, value_head_dim=16, scale=0.3)
LAYOUT = KVLayout((LAYER,), "float32", "float32")
SHAPES = {"first chunk": (23, 23), "one token": (1, 1), "later chunk": (7, 23), "last token": (1, 23)}
"""Pairs of rows, and of keys up to the last row."""


def rows(num_rows: int, num_keys: int, layer: Layer, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return random q, k, v as the model hands them over."""
    generator = torch.Generator().manual_seed(num_rows + 100 * num_keys)
    heads = (
        (num_rows, layer.num_heads, layer.key_head_dim),
        (num_keys, layer.num_kv_heads, layer.key_head_dim),
        (num_keys, layer.num_kv_heads, layer.value_head_dim),
    )
    return [torch.randn(shape, generator=generator).to(dtype) for shape in heads]


def formula(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Layer) -> np.ndarray:
    """Compute one query and head at a time in float64; each sees keys up to its own, at most ``window`` of them."""
    queries, keys, values = (rows.double().numpy() for rows in (q, k, v))
    o = np.zeros((len(queries), layer.num_heads, layer.value_head_dim))
    for row, head in np.ndindex(len(queries), layer.num_heads):
        position = len(keys) - len(queries) + row
        first = max(0, position - layer.window + 1) if layer.window else 0
        first = position - position % layer.window if layer.chunked else first
        kv_head = head * layer.num_kv_heads // layer.num_heads
        scores = keys[first : position + 1, kv_head] @ queries[row, head] * layer.scale
        if layer.soft_cap:
            scores = layer.soft_cap * np.tanh(scores / layer.soft_cap)
        if layer.alibi_slopes:
            scores = scores + layer.alibi_slopes[head] * np.arange(first - position, 1)
        weights = np.exp(scores)
        sink = np.exp(layer.sinks[head]) if layer.sinks else 0.0
        o[row, head] = weights @ values[first : position + 1, kv_head] / (weights.sum() + sink)
    return o


def relative_error(o: torch.Tensor, expected: np.ndarray) -> float:
    """Return the largest of the norm-wise errors of all rows and heads."""
    error = np.linalg.norm(o.double().numpy() - expected, axis=-1)
    return float((error / np.linalg.norm(expected, axis=-1)).max())


@pytest.mark.parametrize("value_head_dim", [16, 12])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("window", [0, 1, 5, 22, 23, 100])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_all_shapes(shape: tuple[int, int], window: int, num_kv_heads: int, value_head_dim: int) -> None:
    layer = replace(LAYER, num_kv_heads=num_kv_heads, value_head_dim=value_head_dim, window=window)
    q, k, v = rows(*shape, layer)
    o = prompt_attention(q, k, v, layer)
    assert o.shape == (shape[0], layer.num_heads, value_head_dim)
    assert relative_error(o, formula(q, k, v, layer)) <= 1e-5
    assert relative_error(o, reference_attention(q, k, v, layer).double().numpy()) <= 1e-5


def test_the_one_head_of_latents_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's kernel reads the keys where they are, for all query heads."""
    layer, given = replace(LAYER, num_kv_heads=1), []
    attend = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention",
        lambda *arrays, **options: (given.extend(arrays[1:3]), attend(*arrays, **options))[1],
    )  # fmt: skip
    q, k, v = rows(7, 23, layer)
    prompt_attention(q, k, v, layer)
    assert [each.untyped_storage().data_ptr() for each in given] == [k.data_ptr(), v.data_ptr()]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("chunk", [1, 5, 22, 23, 100])
def test_chunks(shape: tuple[int, int], chunk: int) -> None:
    layer = replace(LAYER, num_kv_heads=2, window=chunk, chunked=True)
    q, k, v = rows(*shape, layer)
    assert relative_error(prompt_attention(q, k, v, layer), formula(q, k, v, layer)) <= 1e-5
    assert relative_error(reference_attention(q, k, v, layer), formula(q, k, v, layer)) <= 1e-5


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("soft_cap", [0.0, 0.7])
@pytest.mark.parametrize("sinks", [(), (-2.0, 0.0, 1.5, 4.0)], ids=["no sinks", "sinks"])
def test_soft_cap_and_sinks(shape: tuple[int, int], window: int, soft_cap: float, sinks: tuple[float, ...]) -> None:
    layer = replace(LAYER, num_kv_heads=2, window=window, soft_cap=soft_cap, sinks=sinks)
    q, k, v = rows(*shape, layer)
    assert relative_error(prompt_attention(q, k, v, layer), formula(q, k, v, layer)) <= 1e-5


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("mask_elements", [1, 300, 1 << 22])
@pytest.mark.parametrize("soft_cap", [0.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_alibi(
    shape: tuple[int, int],
    window: int,
    mask_elements: int,
    soft_cap: float,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Any number of rows may attend at once."""
    monkeypatch.setattr(prompts, "MASK_ELEMENTS", mask_elements)
    layer = replace(LAYER, num_kv_heads=2, window=window, soft_cap=soft_cap, alibi_slopes=(0.7, 0.1, 0.0, -0.01))
    q, k, v = rows(*shape, layer, dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert relative_error(prompt_attention(q, k, v, layer), formula(q, k, v, layer)) <= tolerance
    assert relative_error(reference_attention(q, k, v, layer), formula(q, k, v, layer)) <= tolerance


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("soft_cap", [0.0, 0.7])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_16_bit_floats(shape: tuple[int, int], soft_cap: float, window: int, dtype: torch.dtype) -> None:
    layer = replace(LAYER, num_kv_heads=2, window=window, soft_cap=soft_cap)
    q, k, v = rows(*shape, layer, dtype)
    o = prompt_attention(q, k, v, layer)
    assert o.dtype == dtype
    assert relative_error(o, formula(q, k, v, layer)) <= 2e-2


def test_plain_layers_take_the_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain layers use the fused kernel, and layers with other rules never do."""
    q, k, v = rows(7, 23, LAYER)

    def refuse(*_: torch.Tensor) -> None:
        raise RuntimeError("the reference was called")

    monkeypatch.setattr(prompts, "reference_attention", refuse)
    prompt_attention(q, k, v, replace(LAYER, window=5))
    prompt_attention(q, k, v, replace(LAYER, alibi_slopes=(0.5,) * 4))
    for layer in (replace(LAYER, soft_cap=1.0), replace(LAYER, sinks=(0.0,) * 4)):
        with pytest.raises(RuntimeError, match="reference"):
            prompt_attention(q, k, v, layer)


def test_chunks_over_the_scratch_equal_the_whole_prompt() -> None:
    layers = [replace(LAYER, num_kv_heads=2), replace(LAYER, num_kv_heads=2, window=9, value_head_dim=8)]
    prompts = {sequence: [rows(40 + sequence, 40 + sequence, layer) for layer in layers] for sequence in (3, 8)}
    scratch = PromptScratch(LAYOUT)
    for start, stop in ((0, 5), (5, 6), (6, 30), (30, 40)):
        for sequence, (index, layer) in ((s, pair) for s in prompts for pair in enumerate(layers)):
            q, k, v = prompts[sequence][index]
            keys, values = scratch.extend(sequence, index, start, k[start:stop], v[start:stop])
            assert torch.equal(keys, k[:stop]) and torch.equal(values, v[:stop])
            o = prompt_attention(q[start:stop], keys, values, layer)
            whole = reference_attention(q[:stop], k[:stop], v[:stop], layer)[start:]
            assert relative_error(o, whole.double().numpy()) <= 1e-5


def test_scratch_writes_a_repeated_chunk_over_and_forgets() -> None:
    """A failed step is computed again at the same place."""
    scratch = PromptScratch(LAYOUT)
    _, k, v = rows(10, 10, LAYER)
    scratch.extend(1, 0, 0, k[:6], v[:6])
    scratch.extend(1, 0, 6, torch.full_like(k[6:], float("nan")), v[6:])
    keys, values = scratch.extend(1, 0, 6, k[6:], v[6:])
    assert torch.equal(keys, k) and torch.equal(values, v)
    scratch.extend(2, 0, 0, k[:1], v[:1])
    assert scratch.sequence_ids == (1, 2)
    for sequence in (1, 1, 77):
        scratch.forget(sequence)
    assert scratch.sequence_ids == (2,)
    keys, _ = scratch.extend(2, 0, 1, k[1:2], v[1:2])
    assert torch.equal(keys, k[:2])


CACHED = (
    replace(LAYER, num_kv_heads=2),
    replace(LAYER, num_kv_heads=2, window=9, value_head_dim=8, alibi_slopes=(0.5, 0.1, 0.02, 0.0)),
    replace(LAYER, soft_cap=2.0, sinks=(0.5, -0.5, 0.0, 1.0)),
)


def prompt_cache(kv_dtype: str = "float32") -> tuple[PromptCache, InprocBackend]:
    backend = InprocBackend([RWorkerSize(1 << 24, 2)], 16)
    backend.open(KVLayout(CACHED, "float32", kv_dtype))
    return PromptCache(backend), backend


def attend_chunks(cache: PromptCache, chunks: dict[int, tuple[int, int]], ends: bool = True) -> dict[int, list]:
    """Run a step with tokens ``start`` to ``stop`` of each prompt; return o of each layer, [rows, heads, dim]."""
    listed = [Chunk(i, 0, a, [0] * (b - a), False, False, b == 40, False) for i, (a, b) in chunks.items()]
    packed = pack(MiniBatch.of(listed), torch.device("cpu"))
    cache.begin_step([MiniBatch.of([]), MiniBatch.of(listed)])
    found: dict[int, list] = {sequence: [] for sequence in chunks}
    for index, layer in enumerate(CACHED):
        parts = [[each[a:b] for each in rows(40 + i, 40 + i, layer)] for i, (a, b) in chunks.items()]
        q, k, v = (torch.cat(each) for each in zip(*parts, strict=True))
        for sequence, o in zip(chunks, cache.attend(index, 1, q, k, v, packed.prompt_rows), strict=True):
            found[sequence].append(o.clone())
    if ends:
        cache.end_step()
    return found


def test_cached_prompts_get_the_same_bits_however_they_are_cut() -> None:
    """The bits are also those of the formula.

    An abandoned step leaves nothing, and forgotten prompts free their blocks.
    """
    cache, backend = prompt_cache()
    whole = attend_chunks(cache, {3: (0, 40), 8: (0, 40)})
    for sequence in (3, 8):
        for o, layer in zip(whole[sequence], CACHED, strict=True):
            q, k, v = (each[:40] for each in rows(40 + sequence, 40 + sequence, layer))
            assert relative_error(o, reference_attention(q, k, v, layer).double().numpy()) <= 1e-5
        cache.forget(sequence)
    cut: dict[int, list[list]] = {3: [], 8: []}
    for step, chunks in enumerate([{3: (0, 5)}, {8: (0, 17), 3: (5, 6)}, {3: (6, 30)}, {8: (17, 40), 3: (30, 40)}]):
        if step == 2:
            attend_chunks(cache, {3: (6, 21)}, ends=False)
            cache.abandon_step()
        for sequence, layers in attend_chunks(cache, chunks).items():
            cut[sequence].append(layers)
    for sequence, parts in cut.items():
        for index in range(len(CACHED)):
            assert torch.equal(torch.cat([part[index] for part in parts]), whole[sequence][index])
        cache.forget(sequence)
    cache.begin_step([MiniBatch.of([])])
    cache.end_step()
    assert backend.blocks_used == 0
    cache.forget(3)  # Prompt 3 is unknown by now.
    backend.close()
