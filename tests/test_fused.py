"""Fused norms and rotary embeddings give what the models' own code gives, in any batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers import model_zoo
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from fastdecode import _sworker
from fastdecode.sworker.model import fused
from fastdecode.sworker.model.fused import FusedRows, Rotary
from fastdecode.sworker.model.prepack import equal_within_rounding
from fastdecode.sworker.products.kernels import use_openmp

pytestmark = pytest.mark.slow

DTYPES = [torch.float32, torch.bfloat16]
ISAS = _sworker.supported_isas()


def bits(rows: torch.Tensor) -> Any:
    return (rows if rows.dtype == torch.float32 else rows.view(torch.uint16)).numpy()


def norm_of(kind: type, dim: int, dtype: torch.dtype) -> torch.nn.Module:
    norm = kind(dim, eps=1e-5)
    torch.nn.init.normal_(norm.weight)
    return norm.to(dtype).requires_grad_(False)


def bf16_steps(found: torch.Tensor, wanted: torch.Tensor) -> int:
    """Return how many bfloat16 numbers of one sign lie between two, at most."""
    return int((found.view(torch.int16).int() - wanted.view(torch.int16).int()).abs().max())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 24, 64, 100, 576, 2048])
def test_rms_norm_matches(dim: int, dtype: torch.dtype, isa: str) -> None:
    """The result is Llama's own; in bfloat16 a few values differ in the last bit."""
    torch.manual_seed(dim)
    norm, rows = norm_of(LlamaRMSNorm, dim, dtype), torch.randn(33, dim).to(dtype)
    out = torch.empty_like(rows)
    _sworker.rms_norm(bits(rows), norm.weight.float().numpy(), 1e-5, True, bits(out), 2, isa)
    wanted = norm(rows)
    assert torch.allclose(out, wanted, rtol=1e-5, atol=1e-7) if dtype is torch.float32 else bf16_steps(out, wanted) <= 1


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 100, 576])
def test_rms_norm_adds_a_residual_before_it_rounds(dim: int, dtype: torch.dtype, isa: str) -> None:
    torch.manual_seed(dim)
    (rows, residual), weight = torch.randn(2, 33, dim).to(dtype), torch.rand(dim).to(dtype)
    residual *= 10
    exact = rows.float() + residual.float()
    out, total, wanted = torch.empty_like(rows), torch.empty_like(rows), torch.empty_like(exact)
    added = {"residual": bits(residual), "total": bits(total)}
    _sworker.rms_norm(bits(rows), weight.float().numpy(), 1e-5, True, bits(out), 2, isa, **added)
    _sworker.rms_norm(bits(exact), np.ones(dim, np.float32), 1e-5, True, bits(wanted), 2, isa)
    assert torch.equal(total, exact.to(dtype)) and torch.equal(out, wanted.to(dtype) * weight)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim"), [(1, 2), (3, 10), (4, 64), (9, 80), (2, 128)])
def test_rotation_is_the_models_own_bit_by_bit(heads: int, dim: int, dtype: torch.dtype, isa: str) -> None:
    """Rows have gaps between them, as slices of a shared product have."""
    torch.manual_seed(dim)
    rows = torch.randn(21, heads * dim + 7)[:, : heads * dim].to(dtype)
    wide = torch.randn(21, heads * dim + 8).to(dtype)
    wide[:, : heads * dim] = rows
    x = wide[:, : heads * dim].view(21, heads, dim)
    cos, sin = torch.randn(2, 21, dim).to(dtype)
    out = torch.empty(21, heads, dim, dtype=dtype)
    _sworker.rotate(bits(x), bits(cos), bits(sin), bits(out), 2, isa)
    own, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos[None], sin[None])
    assert torch.equal(out, own[0].transpose(0, 1))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_gets_the_same_bits_in_any_company_and_from_any_thread(dtype: torch.dtype, isa: str) -> None:
    use_openmp()
    rows, weight = torch.randn(40, 300).to(dtype), torch.randn(300).numpy()
    cos, sin = torch.randn(2, 40, 30).to(dtype)
    parts, places = torch.randn(120, 300).to(dtype), torch.randint(0, 120, (40, 3))
    factors = torch.rand(40, 3).to(dtype)

    def all_of(some: slice, threads: int) -> list[torch.Tensor]:
        normed, summed = torch.empty_like(rows[some]), torch.empty_like(rows[some])
        turned = torch.empty(len(normed), 10, 30, dtype=dtype)
        _sworker.rms_norm(bits(rows[some]), weight, 1e-6, True, bits(normed), threads, isa)
        _sworker.rotate(bits(rows[some].view(-1, 10, 30)), bits(cos[some]), bits(sin[some]), bits(turned), threads, isa)
        _sworker.sum_weighted(bits(parts), places[some].numpy(), bits(factors[some]), bits(summed), threads, isa)
        return [normed, turned, summed]

    together = all_of(slice(0, 40), 1)
    for threads in (2, 3):
        assert all(map(torch.equal, all_of(slice(0, 40), threads), together))
    for row in range(40):
        alone = all_of(slice(row, row + 1), 1)
        assert all(torch.equal(own[0], whole[row]) for own, whole in zip(alone, together, strict=True))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("terms", "dim"), [(1, 5), (2, 64), (8, 200), (3, 2048)])
def test_weighted_sums_are_plain_torchs_bit_by_bit(terms: int, dim: int, dtype: torch.dtype, isa: str) -> None:
    """Products are rounded to the dtype, and sums once at their end, as the experts' sums of transformers are."""
    use_openmp()
    parts, weights = torch.randn(50, dim).to(dtype), torch.randn(23, terms).to(dtype)
    places, out = torch.randint(0, 50, (23, terms)), torch.empty(23, dim, dtype=dtype)
    _sworker.sum_weighted(bits(parts), places.numpy(), bits(weights), bits(out), 2, isa)
    wanted = sum((parts[places[:, i]] * weights[:, i, None]).float() for i in range(terms))
    assert torch.equal(out, wanted.to(dtype))  # type: ignore[union-attr]
    for wrong in (places + 50, places - 51, places[:20], places[:, :0]):
        with pytest.raises(ValueError):
            _sworker.sum_weighted(bits(parts), wrong.numpy().copy(), bits(weights), bits(out), 1, isa)


def test_not_a_number_stays_one() -> None:
    rows = torch.full((1, 32), float("nan")).bfloat16()
    out = torch.zeros_like(rows)
    _sworker.rms_norm(bits(rows), np.ones(32, np.float32), 1e-6, True, bits(out))
    assert out.isnan().all()


def test_arrays_that_do_not_fit_are_refused() -> None:
    x, weight = np.zeros((4, 8), np.float32), np.ones(8, np.float32)
    for arguments in (
        (x, weight[:7], 1e-6, True, x),
        (x, weight, 1e-6, True, x[:3]),
        (x, weight, 1e-6, True, x, 1, "vax"),
    ):
        with pytest.raises(ValueError):
            _sworker.rms_norm(*arguments)
    for wrong in ({"residual": x}, {"residual": x[:3], "total": x}, {"residual": x, "total": x[:3]}):
        with pytest.raises(ValueError):
            _sworker.rms_norm(x, weight, 1e-6, True, x, **wrong)
    with pytest.raises(TypeError):
        _sworker.rms_norm(x.astype(np.float64), weight, 1e-6, True, x)
    heads, angles = np.zeros((4, 2, 8), np.float32), np.zeros((4, 8), np.float32)
    for wrong in ((heads[..., :7], angles, angles, heads), (heads[..., ::2], angles[:, :4], angles[:, :4], heads)):
        with pytest.raises((ValueError, TypeError)):
            _sworker.rotate(*wrong)
    for wrong in ((heads, angles[:3], angles, heads), (heads, angles, angles[:, :6].copy(), heads)):
        with pytest.raises(ValueError):
            _sworker.rotate(*wrong)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Gemma2RMSNorm, GptOssRMSNorm])
def test_every_form_of_the_norm_is_found(kind: type, dtype: torch.dtype) -> None:
    norm = norm_of(kind, 96, dtype)
    rows = torch.randn(1, 20, 96).to(dtype)
    wanted = norm(rows)
    found = FusedRows(torch.nn.Sequential(norm))
    assert found.num_norms == 1 and "forward" in vars(norm)
    assert equal_within_rounding(norm(rows), wanted)
    found.undo()
    assert "forward" not in vars(norm)


def test_a_norm_of_another_form_is_left_out() -> None:
    class OddRMSNorm(LlamaRMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scaled: torch.Tensor = super().forward(x) * 1.001
            return scaled

    norm = norm_of(OddRMSNorm, 96, torch.float32)
    assert FusedRows(torch.nn.Sequential(norm)).num_norms == 0
    assert "forward" not in vars(norm)


def test_a_rotation_of_another_form_is_left_out() -> None:
    def backwards(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return apply_rotary_pos_emb(q, k, cos, -sin)

    assert fused.rotates_alike(Rotary(apply_rotary_pos_emb), 64, torch.float32)
    assert not fused.rotates_alike(Rotary(backwards), 64, torch.float32)
    assert not fused.rotates_alike(Rotary(lambda q: q), 64, torch.float32)


def test_what_a_rotation_does_not_know_goes_to_the_models_own() -> None:
    """Partly rotated heads, several sequences and other dtypes are left to the model's own code."""
    calls = []

    def own(*arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(arguments)
        return arguments[0], arguments[1]

    rotary, cos = Rotary(own), torch.randn(1, 16, 32)
    for q in (torch.randn(1, 4, 16, 64), torch.randn(2, 4, 16, 32), torch.randn(1, 4, 16, 32).bfloat16()):
        rotary(q, q, cos, cos)
    assert len(calls) == 3


NORMS = {"llama-gqa": 7, "mistral": 13, "qwen2": 7, "qwen3": 13, "phi3": 7, "gemma2": 17, "mixtral": 7}
NORMS |= {"qwen3_moe": 13, "gpt_oss": 9, "opt": 0, "gpt_bigcode": 0, "gpt_neox": 0}
ROTARY = {"llama-gqa": 3, "mistral": 6, "qwen2": 3, "qwen3": 3, "phi3": 3, "gemma2": 4, "mixtral": 3, "qwen3_moe": 3}


@pytest.mark.parametrize("name", NORMS)
def test_the_models_code_has_them_replaced(name: str) -> None:
    """The logits stay the same; test_exactness.py compares the tokens."""
    model = model_zoo.build_model(name).requires_grad_(False)
    ids = torch.tensor([model_zoo.prompts(name)[2]])
    wanted = model(ids, use_cache=False).logits
    found = FusedRows(model)
    assert (found.num_norms, found.num_rotary) == (NORMS[name], ROTARY.get(name, 0))
    assert torch.allclose(model(ids, use_cache=False).logits, wanted, atol=1e-4)
    found.undo()
    assert torch.equal(model(ids, use_cache=False).logits, wanted)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 2, 31, 257, 4099])
def test_the_likeliest_is_torchs(vocab: int, dtype: torch.dtype, isa: str) -> None:
    """Among equal logits, zeros of both signs included, the first is chosen; rows without a finite largest fail."""
    logits = torch.randn(64, vocab, generator=torch.Generator().manual_seed(vocab)).to(dtype)
    logits[:16] = logits[:16].round()
    logits[16:32] = torch.where(logits[16:32] > 0, -torch.zeros(()), logits[16:32])
    logits[20:24, vocab // 2] = 0.0
    for row, odd in enumerate((math.nan, -math.nan, math.inf, -math.inf), 32):
        logits[row, vocab // 3] = logits[row + 4, vocab - 1] = logits[row + 8, 0] = logits[row + 12] = odd
    found, best = torch.empty(64, dtype=torch.int64), logits.max(-1)
    _sworker.choose_likeliest(bits(logits), found.numpy(), 2, isa)
    assert torch.equal(found, best.indices.masked_fill(~best.values.isfinite(), -1))
    assert (found[44:48] == -1).all() and (found[:32] >= 0).all()
    with pytest.raises(ValueError, match="vocab"):
        _sworker.choose_likeliest(bits(logits[:, :0]), found.numpy(), 1, isa)
