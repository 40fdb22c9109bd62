"""Kernels that compute rows on a GPU in one launch each, in Triton's interpreter, against torch and the models."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import model_zoo, tiny_hybrids

from fastdecode.sworker.model import gpu_rows
from fastdecode.sworker.model.gpu_rows import GpuRows
from fastdecode.sworker.model.prepack import equal_within_rounding

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

interpreted = pytest.mark.skipif(not INTERPRETED, reason="these run in the process that the last test starts")


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is that process")
def test_all_of_these_in_tritons_interpreter() -> None:
    """The tests run in a process of their own, since triton reads the variable when it is imported."""
    pytest.importorskip("triton", reason="pip install triton, which GPU builds of torch bring along")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", __file__]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        command, env=environment, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(dtype)


@interpreted
@pytest.mark.parametrize("width", [64, 96, 100])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("offset", "round_first"), gpu_rows.NORM_FORMS)
def test_norms(offset: float, round_first: bool, dtype: torch.dtype, width: int) -> None:
    from fastdecode.sworker.model.triton_rows import rms_norm

    x, weight = random(1, 5, 3, width, dtype=dtype), random(width, dtype=dtype)
    wide = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    scale = weight.float() + offset
    wanted = (wide.to(dtype).float() * scale if round_first else wide * scale).to(dtype)
    assert equal_within_rounding(rms_norm(x, weight, 1e-6, offset, round_first), wanted)
    assert rms_norm(x[:, :0], weight, 1e-6, offset, round_first).shape == (1, 0, 3, width)


@interpreted
@pytest.mark.parametrize("dim", [16, 24, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotations_of_views(dtype: torch.dtype, dim: int) -> None:
    """Heads are transposed views of rows, with any strides."""
    from fastdecode.sworker.model.triton_rows import rotate

    rows = random(1, 7, 3, 2 * dim, dtype=dtype)[..., dim:].transpose(1, 2)
    cos, sin = random(1, 7, dim, dtype=dtype), random(1, 7, dim, dtype=dtype) * 0.5
    first, second = rows.float().chunk(2, -1)
    wanted = rows.float() * cos.float() + torch.cat((-second, first), -1) * sin.float()
    assert equal_within_rounding(rotate(rows, cos, sin), wanted.to(dtype))


@interpreted
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates(dtype: torch.dtype) -> None:
    from fastdecode.sworker.model.triton_rows import silu_times

    gate, up = random(1, 3, 1000, dtype=dtype) * 4, random(1, 3, 1000, dtype=dtype).flip(-1)
    wanted = torch.nn.functional.silu(gate.float()).to(dtype).float() * up.float()
    assert equal_within_rounding(silu_times(gate, up), wanted.to(dtype))


@interpreted
@pytest.mark.parametrize(
    ("name", "norms", "rotated", "gated"),
    [
        ("llama-gqa", True, True, True),
        ("gemma2", True, True, False),
        ("qwen3", True, True, True),
        ("gptj", False, False, False),
    ],
)
def test_models_answer_as_before(name: str, norms: bool, rotated: bool, gated: bool) -> None:
    """Each model's logits are those of its own code within rounding, and all replacements can be undone."""
    model = model_zoo.build_model(name)
    ids = torch.tensor([tiny_hybrids.random_prompts((20,))[0]])
    with torch.inference_mode():
        wanted = model(ids).logits
        rows = GpuRows(model, anywhere=True)
        assert [count > 0 for count in rows.counts.values()] == [norms, rotated, gated]
        found = model(ids).logits
        assert (found - wanted).abs().max() <= 1e-3 * wanted.abs().max()
        rows.undo()
        assert torch.equal(model(ids).logits, wanted)


@interpreted
def test_what_differs_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm that computes something else keeps its own code."""
    model = model_zoo.build_model("llama-gqa")
    kind = type(model.model.norm)
    own = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: own(self, x) * 1.01)
    assert GpuRows(model, anywhere=True).counts["norms"] == 0


def test_a_cpu_keeps_its_own_rows() -> None:
    rows = GpuRows(model_zoo.build_model("llama-gqa"))
    assert set(rows.counts.values()) == {0}
