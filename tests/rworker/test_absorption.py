"""K and V of latent layers, multiplied by R-workers, give what absorbed queries and a plain product give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from fastdecode import _rworker
from fastdecode.core.dtypes import ITEM_BYTES
from fastdecode.kinds import Absorption, Latent, Layer
from fastdecode.sworker.run.staging import TORCH_DTYPE, from_numpy, to_numpy

from .harness import table

ATTEND, PARTIAL, READ = 1, 2, 3
HEADS, RANK, ROPE, NOPE, VALUE = 7, 40, 9, 21, 19
LATENT = Latent(HEADS, 1, RANK + ROPE, RANK, 0.15)
ABSORBING = replace(LATENT, absorption=Absorption(NOPE, VALUE))
TOLERANCE = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}


def random(seed: int, *shape: int, dtype: str = "float32") -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)).to(TORCH_DTYPE[dtype])


def weights(dtype: str, layer: int = 0) -> torch.Tensor:
    return random(90 + layer, HEADS, NOPE + VALUE, RANK, dtype=dtype) / 5


def make_worker(layers: list[Layer], dtype: str, **settings: Any) -> _rworker.RWorker:
    """Return an R-worker that has all weights, sent to it some heads at a time."""
    options = {"block_size": 16, "num_blocks": 200, "num_threads": 1} | settings
    worker = _rworker.RWorker(layers=layers, model_dtype=dtype, kv_dtype=dtype, **options)
    for number, layer in enumerate(layers):
        if layer.absorption:
            for heads in (slice(3, 7), slice(0, 3)):
                worker.set_weights(number, heads.start, to_numpy(weights(dtype, number)[heads]))
    return worker


def step(worker: _rworker.RWorker, dtype: str, layer: Layer, spans: list, q: torch.Tensor, k: torch.Tensor) -> Any:
    """Run a step, and return o [rows of ATTEND spans, heads, dim] and the partial results of the one layer."""
    worker.begin_step(table([]), [table(spans)])
    count = sum(rows for _, _, rows, mode in spans if mode == ATTEND)
    nodes = sum(
        rows * (1 if mode == READ else (context // 512 + 1).bit_count())
        for _, context, rows, mode in spans
        if mode != ATTEND
    )
    out = to_numpy(torch.zeros((count, HEADS, layer.output_dim), dtype=TORCH_DTYPE[dtype]))
    partials = np.zeros((nodes, *layer.partial_shape), np.float32) if nodes else None
    worker.run(0, 0, to_numpy(q), to_numpy(k), to_numpy(k[..., :0]), out, partials)
    worker.end_step()
    return from_numpy(out, TORCH_DTYPE[dtype]).float(), partials


def absorbed(q: torch.Tensor) -> torch.Tensor:
    """Return queries over latents, rounded to their dtype."""
    heads = weights("float32")[:, :NOPE].to(q.dtype).float()
    nope = torch.einsum("thn,hnr->thr", q[..., :NOPE].float(), heads)
    return torch.cat((nope.to(q.dtype), q[..., NOPE:]), -1)


def expanded(o: torch.Tensor, dtype: str) -> torch.Tensor:
    return torch.einsum("thr,hvr->thv", o.float(), weights("float32")[:, NOPE:].to(TORCH_DTYPE[dtype]).float())


def test_equals_absorbed_queries_and_expanded_outputs() -> None:
    """Absorbed queries and expanded outputs are equalled in every dtype and instruction set, for several sequences."""
    spans = [(1, 0, 60, ATTEND), (2, 0, 1, ATTEND), (3, 0, 5, ATTEND)]
    for isa in _rworker.supported_isas():
        for dtype, tolerance in TOLERANCE.items():
            q, k = random(1, 66, HEADS, NOPE + ROPE, dtype=dtype), random(2, 66, 1, RANK + ROPE, dtype=dtype)
            found, _ = step(make_worker([ABSORBING], dtype, isa=isa), dtype, ABSORBING, spans, q, k)
            over_latents, _ = step(make_worker([LATENT], dtype, isa=isa), dtype, LATENT, spans, absorbed(q), k)
            wanted = expanded(over_latents, dtype)
            assert torch.linalg.norm(found - wanted) < tolerance * torch.linalg.norm(wanted), (isa, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_has_the_same_bits_alone_and_among_others(dtype: str) -> None:
    """A row's bits depend neither on other rows, nor on threads, nor on ``submit`` or ``run``."""
    q, k = random(3, 127, HEADS, NOPE + ROPE, dtype=dtype), random(4, 127, 1, RANK + ROPE, dtype=dtype)
    alone = make_worker([ABSORBING], dtype)
    wanted = [step(alone, dtype, ABSORBING, [(i, 0, 1, ATTEND)], q[i : i + 1], k[i : i + 1])[0] for i in range(127)]
    for num_threads in (1, 3):
        many = make_worker([ABSORBING], dtype, num_threads=num_threads)
        found, _ = step(many, dtype, ABSORBING, [(i, 0, 1, ATTEND) for i in range(127)], q, k)
        assert torch.equal(found, torch.cat(wanted))
        many.begin_step(table([]), [table([(i, 1, 1, ATTEND) for i in range(127)])])
        out = to_numpy(torch.zeros((127, HEADS, VALUE), dtype=TORCH_DTYPE[dtype]))
        many.submit(0, 0, to_numpy(q), to_numpy(k), to_numpy(k[..., :0]), out)
        many.wait(0)
        many.end_step()
        again = step(alone, dtype, ABSORBING, [(9, 1, 1, ATTEND)], q[9:10], k[9:10])[0]
        alone = make_worker([ABSORBING], dtype)
        step(alone, dtype, ABSORBING, [(9, 0, 1, ATTEND)], q[9:10], k[9:10])
        assert torch.equal(from_numpy(out, TORCH_DTYPE[dtype])[9].float(), again[0])


def test_partial_results_of_ranges_are_expanded_one_by_one() -> None:
    """V times a sum equals the sum of V times its parts, so each partial result over latents is expanded alone."""
    k, q = random(5, 1025, 1, RANK + ROPE), random(6, 2, HEADS, NOPE + ROPE)
    parts = {}
    for layer, queries in ((ABSORBING, q), (LATENT, absorbed(q))):
        worker = make_worker([layer], "float32")
        none = torch.zeros((512, *queries.shape[1:]))
        step(worker, "float32", layer, [(1, 0, 512, ATTEND)], none, k[:512])
        step(worker, "float32", layer, [(2, 0, 512, ATTEND)], none, k[512:1024])
        spans = [(1, 1024, 1, READ), (2, 512, 1, PARTIAL)]
        parts[layer.output_dim] = step(worker, "float32", layer, spans, queries, k[1024:])[1]
    found, latents = torch.from_numpy(parts[VALUE]), torch.from_numpy(parts[RANK])
    assert torch.allclose(found[..., :2], latents[..., :2], rtol=1e-5) and len(found) == 2
    assert torch.allclose(found[..., 2:], expanded(latents[..., 2:], "float32"), atol=1e-4, rtol=1e-4)


def test_what_is_refused() -> None:
    """A step before all heads have come is refused, and weights for other layers, heads, shapes and dtypes."""
    worker = _rworker.RWorker(
        layers=[LATENT, ABSORBING],
        model_dtype="float32",
        kv_dtype="float32",
        block_size=16,
        num_blocks=9,
        num_threads=1,
    )
    rows = to_numpy(weights("float32"))
    worker.set_weights(1, 0, rows[:6])
    with pytest.raises(ValueError, match="layer 1 did not come yet"):
        worker.begin_step(table([]), [table([(1, 0, 1, ATTEND)])])
    # Controls need no weights, so an S-worker may leave before it has sent any.
    worker.begin_step(table([]), [table([])])
    worker.end_step()
    for layer, first, given, message in (
        (0, 0, rows, "layer 0 multiplies no K and V"),
        (2, 0, rows, "layer 2 multiplies no K and V"),
        (1, 6, rows[:2], "heads 6 to 7; the layer has 7"),
        (1, -1, rows[:2], "heads -1 to 0"),
        (1, 0, rows[:, 1:], "rows must be"),
        (1, 0, rows.view(np.uint32), "rows must be"),
    ):
        with pytest.raises(ValueError, match=message):
            worker.set_weights(layer, first, given)
    worker.set_weights(1, 6, rows[6:])
    worker.begin_step(table([]), [table([])])
    with pytest.raises(ValueError, match="a step is open"):
        worker.set_weights(1, 0, rows)
    with pytest.raises(ValueError, match="absorption needs one KV head"):
        make_worker([Latent(4, 4, 16, 16, 1.0, absorption=Absorption(8, 8))], "float32")


def test_bytes_of_weights_are_those_of_deepseek_v3() -> None:
    layer = Latent(128, 1, 576, 512, 1.0, absorption=Absorption(128, 128))
    assert layer.weight_bytes(ITEM_BYTES["bfloat16"]) == 128 * 256 * 512 * 2
    assert sum(heads * dim for heads, dim in (layer.row_shapes[0], layer.row_shapes[3])) == 128 * (192 + 128)
