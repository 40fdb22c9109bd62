"""Weights of int8 that are rounded for calibrating rows: exact on every machine, and closer to the model's outputs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import calibrated_codes, model_zoo

from fastdecode import LLM, SamplingParams, _sworker
from fastdecode.api.config import EngineConfig
from fastdecode.core.errors import ConfigError, ModelLoadError
from fastdecode.sworker import SModel
from fastdecode.sworker.products import kernels
from fastdecode.sworker.products.calibration import check_ranks, row_codes
from fastdecode.sworker.products.codes import quantized, rotated, unrotated
from fastdecode.sworker.products.exact import attended, cosine
from fastdecode.sworker.products.rounding import FARTHEST, SWEEPS, descend, fraction_bits, moments_of, round_again

AVX2 = {"FASTDECODE_ISA": "avx2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
SCALAR = {"FASTDECODE_ISA": "scalar", "ATEN_CPU_CAPABILITY": "default"}
MODELS = ("llama-gqa", "qwen2", "phi3", "gemma2")
"""Models without biases, with biases, with one layer for q, k and v, and with gated gelu."""


def slow_descent(exact: list[int], codes: list[int], moments: list[list[int]], unit: int) -> list[int]:
    """Return one row's codes by Python's integers: each in turn becomes the best that it may be."""
    codes, nearest, places = [*codes], [*codes], range(len(codes))
    for _ in range(SWEEPS):
        for i in places:
            slope = sum((exact[k] - codes[k] * unit) * moments[k][i] for k in places)
            step = moments[i][i] * unit
            move, rest = divmod(slope, step)
            move += rest * 2 > step or (rest * 2 == step and move % 2)
            least, most = max(-127, nearest[i] - FARTHEST), min(127, nearest[i] + FARTHEST)
            codes[i] = min(most, max(least, codes[i] + move))
    return codes


def loss(exact: list[int], codes: list[int], moments: list[list[int]], unit: int) -> int:
    """Return error * moments * error of one row, exactly."""
    errors = [own - code * unit for own, code in zip(exact, codes, strict=True)]
    return sum(a * b * moments[i][k] for i, a in enumerate(errors) for k, b in enumerate(errors))


def example(width: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return unrounded codes [9, width], the nearest codes, and moments of correlated rows."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(width, width, generator=generator) ** 3
    rows = torch.randn(40, width, generator=generator) @ mixing
    codes = (rows / rows.abs().amax(-1, keepdim=True) * 127).round().to(torch.int8)
    exact = torch.randn(9, width, generator=generator).double() * 60
    exact[0] = torch.arange(width).double() + 0.5  # ties
    exact = exact.clamp(-127, 127)
    return exact, exact.round().to(torch.int8), moments_of(codes)


@pytest.mark.parametrize("isa", _sworker.supported_isas())
@pytest.mark.parametrize("width", [1, 5, 16, 33])
def test_the_descent_is_that_of_plain_integers(width: int, isa: str) -> None:
    kernels.use_openmp()
    exact, nearest, moments = example(width, width)
    unit = 1 << fraction_bits(moments)
    whole, table = torch.round(exact * unit).long().tolist(), moments.long().tolist()
    wanted = [slow_descent(own, codes, table, unit) for own, codes in zip(whole, nearest.tolist(), strict=True)]
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found = nearest.clone()
        descend(exact, found, moments, isa)
        assert found.tolist() == wanted
    losses = [[loss(own, each, table, unit) for own, each in zip(whole, several, strict=True)]
              for several in (wanted, nearest.tolist())]  # fmt: skip
    assert all(after <= before for after, before in zip(*losses, strict=True))
    assert width == 1 or sum(losses[0]) < sum(losses[1])


@pytest.mark.parametrize(("width", "rows"), [(64, 16), (576, 2048), (28672, 8192), (130_000, 8192)])
def test_no_sum_leaves_the_integers_of_float64(width: int, rows: int) -> None:
    """The bound counts the largest moments that so many rows can have, and the farthest codes."""
    moments = torch.eye(1).expand(width, 1).double() * (rows * 127 * 127 * 1.3)
    bits = fraction_bits(_OnlyDiagonal(moments))  # type: ignore[arg-type]
    farthest = (FARTHEST + 1) * 2**bits
    assert 4 <= bits <= 10 and width * farthest * rows * 127 * 127 * 1.3 < 2**53


class _OnlyDiagonal:
    """Moments too large for a test's memory, of which only the diagonal exists."""

    def __init__(self, diagonal: torch.Tensor) -> None:
        self._diagonal = diagonal

    def __len__(self) -> int:
        return len(self._diagonal)

    def diagonal(self) -> torch.Tensor:
        return self._diagonal


def test_codes_of_rows_are_those_of_the_product() -> None:
    """The identity matrix returns each row's codes, with an activation too."""
    kernels.use_openmp()
    rows = torch.randn(9, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    for block in (32, 96):
        assert torch.equal(row_codes(rows, 96, block, "none", 40), quantized(rows, block).codes.int())
    pairs = torch.randn(9, 192, generator=torch.Generator().manual_seed(2))
    activated = torch.nn.functional.silu(pairs[:, :96]) * pairs[:, 96:]
    apart = row_codes(pairs, 96, 32, "silu") - quantized(activated, 32).codes.int()
    assert apart.abs().max() <= 1 and (apart != 0).float().mean() < 0.01


@pytest.mark.parametrize("block", [1, 32, 96, 3360])
def test_a_rotation_is_undone(block: int) -> None:
    rows = torch.randn(3, 3360, generator=torch.Generator().manual_seed(3)).double()
    assert torch.allclose(unrotated(rotated(rows, block), block), rows)
    own = quantized(rows.float(), block)
    assert ((rotated(rows, block) / own.scales[:, None]).round() != own.codes).double().mean() < 1e-3


def test_attention_and_cosines_are_close_to_torchs() -> None:
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(heads, 50, 16, generator=generator) for heads in (4, 2, 2))
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q, k.repeat_interleave(2, 0), v.repeat_interleave(2, 0), is_causal=True
    )
    assert torch.allclose(attended(q, k, v, 16**-0.5).float(), wanted, atol=3e-3)
    angles = torch.linspace(-40, 200, 999).double()
    assert torch.allclose(cosine(angles), angles.cos(), atol=1e-9)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("models")
    return [str(model_zoo.save_model(name, root / name)) for name in MODELS]


@pytest.fixture(scope="module")
def identities(folders: list[str]) -> list[str]:
    torch.set_num_threads(1)
    return calibrated_codes.identities(folders)


@pytest.mark.slow
def test_threads_change_no_code(folders: list[str], identities: list[str]) -> None:
    torch.set_num_threads(2)
    assert calibrated_codes.identities(folders) == identities
    assert len({*identities}) == len(identities)


@pytest.mark.thorough
@pytest.mark.parametrize("environment", [AVX2, SCALAR], ids=["avx2", "scalar"])
def test_instruction_sets_change_no_code(
    folders: list[str], identities: list[str], environment: dict[str, str]
) -> None:
    command = [sys.executable, calibrated_codes.__file__, *folders]
    found = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=True)
    assert found.stdout.split() == identities


@pytest.mark.slow
def test_numbers_of_tokens_are_other_models(folders: list[str], identities: list[str]) -> None:
    """Sessions, parked prefixes and prefill workers compare identities, so none mixes two roundings."""
    for num_tokens in (0, 299):
        settings = calibrated_codes.SETTINGS | {"int8_calibration_tokens": num_tokens, "dtype": "float32"}
        assert SModel(EngineConfig(folders[0], **settings)).identity not in identities


def test_outputs_of_other_rows_come_closer() -> None:
    """Rows of the same kind as the calibrating ones lose a third of their error or more."""
    generator = torch.Generator().manual_seed(6)
    mixing = torch.randn(24, 96, generator=generator)
    rows = torch.randn(2, 500, 24, generator=generator) @ mixing + torch.randn(2, 500, 96, generator=generator) / 4
    weight = torch.randn(80, 96, generator=generator).bfloat16()
    weight[5] = 0.0
    codes = quantized(weight, 96)
    wanted, errors = rows[1] @ weight.float().T, []
    for calibrates in (False, True):
        if calibrates:
            round_again(codes, weight, moments_of(row_codes(rows[0], 96, 96, "none")), 33)
        errors.append(float((rows[1] @ codes.weight(torch.float32).T - wanted).square().sum()))
    assert errors[1] < errors[0] * 2 / 3 and not codes.codes[5].any()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", "opt", "gpt_neox"])
def test_models_whose_weights_could_differ_are_refused(name: str, tmp_path: Path) -> None:
    folder = model_zoo.save_model(name, tmp_path)
    with pytest.raises(ConfigError, match=r"int8_calibration_tokens: .*: leave it out"):
        SModel(EngineConfig(str(folder), **calibrated_codes.SETTINGS))


@pytest.mark.parametrize("given", [{}, {"quantization": "unpack"}, {"quantization": "int8", "device": "cuda"}])
def test_other_quantizations_are_not_calibrated(given: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastdecode.api.config._has_gpu_driver", lambda: True)
    with pytest.raises(ConfigError, match="int8_calibration_tokens: only quantization int8 on a CPU"):
        EngineConfig(int8_calibration_tokens=100, **given)  # type: ignore[arg-type]


class TwoRanks:
    """Gathers what rank 0 sends, and for rank 1 the same with another last number."""

    size = 2

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor, torch.cat([tensor[:-1], tensor[-1:] + 1])]


def test_ranks_that_differ_are_refused() -> None:
    with pytest.raises(ModelLoadError, match="rank 1 and rank 0 round weights differently"):
        check_ranks(TwoRanks(), "00" * 32)  # type: ignore[arg-type]


@pytest.mark.slow
def test_two_ranks_have_the_codes_of_one(folders: list[str], tmp_path: Path) -> None:
    """A journal's identity describes the whole model, not one rank's heads."""
    settings = calibrated_codes.SETTINGS | {"dtype": "float32", "r_workers": "inproc:1", "kv_cache_memory": "16MiB"}
    prompts = [{"prompt_token_ids": each} for each in model_zoo.prompts("llama-gqa")[:3]]
    found = []
    for num_ranks in (1, 2):
        settings |= {"tensor_parallel_size": num_ranks, "journal": str(tmp_path / str(num_ranks))}
        with LLM(folders[0], s_threads=1, r_threads=1, **settings) as llm:
            asked = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            tokens = [list(each.outputs[0].token_ids) for each in llm.generate(prompts, asked, use_tqdm=False)]
            found.append((tokens, llm.engine.s_model.identity))
    assert found[0] == found[1]
