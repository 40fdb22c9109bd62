"""Products of int8 codes have the bits of plain torch with every instruction set and in any batch."""

from __future__ import annotations

import json
import logging
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import integer_oracle, model_zoo
from helpers.integer_oracle import multiplied, product, weights_of
from safetensors.torch import load_file, save_file

from fastdecode import LLM, SamplingParams, _sworker
from fastdecode.api.config import EngineConfig
from fastdecode.core.errors import ConfigError, ModelLoadError
from fastdecode.sworker import SModel
from fastdecode.sworker.model.code import ModelCode
from fastdecode.sworker.model.packed_weight import PackedWeight
from fastdecode.sworker.model.support import repeats_rows
from fastdecode.sworker.products import kernels
from fastdecode.sworker.products.codes import block_of, quantized, set_codes, unrotated
from fastdecode.sworker.products.experts import ExpertProducts
from fastdecode.sworker.products.kernels import integer_isa
from fastdecode.sworker.products.layers import LayerInTwoCalls
from fastdecode.sworker.products.linears import IntegerLinears, IntegerProduct
from fastdecode.sworker.products.ordered import ordered_linear

MOST_USED = ("llama-gqa", "mistral", "qwen2", "qwen3", "gemma2", "phi3", "mixtral", "qwen3_moe", "gpt_oss", "opt")
MOST_USED += ("gpt_neox", "falcon")
ISAS = _sworker.integer_isas()
DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("instructions", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("columns", "width"), [(1, 4), (33, 18), (64, 64), (100, 72), (40, 576), (31, 1000), (20, 3360)]
)
def test_products_are_those_of_plain_torch_bit_by_bit(
    columns: int, width: int, dtype: torch.dtype, instructions: str
) -> None:
    torch.manual_seed(width)
    kernels.use_openmp()
    rows, weight = torch.randn(70, width).to(dtype), torch.randn(columns, width).to(dtype)
    rows[3] *= 1e4
    rows[4, 0] = 300.0
    for bias in (None, torch.randn(columns)):
        for block in {1, width & -width, *({width} if width % 16 == 0 else ())}:
            weights = weights_of(weight, bias, block)
            wanted = multiplied(rows, weight, bias, block, dtype)
            for count in (0, 1, 2, 3, 11, 13, 16, 70):
                for threads in (1, 2):
                    found = product(weights, rows[:count].contiguous(), columns, instructions, threads)
                    assert torch.equal(found, wanted[:count]), (count, threads, block)


@pytest.mark.parametrize("instructions", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_rows(activation: str, dtype: torch.dtype, instructions: str) -> None:
    """The kernels' activations are torch's own within rounding, and the oracle's bit by bit."""
    torch.manual_seed(1)
    gate, up = (4 * torch.randn(37, 96)).to(dtype), torch.randn(37, 96).to(dtype)
    gate[0, :6] = torch.tensor([-1e4, 1e4, -88.0, 88.0, 0.0, -0.0]).to(dtype)
    weight = torch.randn(48, 96)
    found = product(weights_of(weight, None, 32), torch.cat((gate, up), -1), 48, instructions, kind=activation)
    x = integer_oracle.gated(gate, up, activation)
    assert torch.equal(found, multiplied(x, weight, None, 32, dtype))
    own = torch.nn.functional.silu(gate) if activation == "silu" else torch.nn.functional.gelu(gate, approximate="tanh")
    assert torch.allclose(x.float(), (own * up).float(), rtol=1e-5 if dtype is torch.float32 else 2e-2, atol=1e-5)


@pytest.mark.parametrize("instructions", ISAS)
def test_rows_that_are_no_numbers_stay_so_and_zeros_stay_zeros(instructions: str) -> None:
    rows = torch.randn(6, 64)
    rows[1, 5], rows[2, 7], rows[3], rows[4] = torch.nan, torch.inf, 0.0, 1e-38
    bias = torch.randn(20)
    found = product(weights_of(torch.randn(20, 64), bias, 64), rows, 20, instructions)
    assert not found[1].isfinite().any() and not found[2].isfinite().any()
    assert torch.equal(found[3], bias) and torch.equal(found[4], bias)
    assert found[[0, 5]].isfinite().all()


def test_no_rows_are_multiplied() -> None:
    """A forward of which no row is sampled gives the head no rows."""
    linear = torch.nn.Linear(64, 48).requires_grad_(False)
    set_codes(linear, quantized(linear.weight, 64))
    IntegerLinears(torch.nn.Sequential(linear))
    assert linear(torch.empty(1, 0, 64)).shape == (1, 0, 48)
    assert ordered_linear(torch.empty(1, 0, 64), torch.empty(5, 64)).shape == (1, 0, 5)


def test_a_rotation_is_undone() -> None:
    for width, block in ((96, 32), (96, 96), (576, 576), (3360, 3360)):
        weight = torch.randn(30, width)
        codes = quantized(weight, block)
        assert (codes.weight(torch.float32) - weight).abs().max() < 0.05
        assert torch.allclose(unrotated(integer_oracle.rotated(weight, block), block), weight, atol=1e-5)


def test_a_peak_is_spread_over_a_whole_row() -> None:
    """One large element of 576 must not take the codes of all others."""
    rows = torch.zeros(1, 576)
    rows[0, 77] = 1000.0
    assert integer_oracle.rotated(rows, 64).abs().max() == 1000.0
    assert integer_oracle.rotated(rows, 576).abs().max() < 450.0


def test_a_block_divides_the_share_of_every_number_of_ranks() -> None:
    for width, heads in ((576, 9), (1536, 9), (2816, 16), (4096, 32), (11008, 32), (14336, 32), (100, 3)):
        block = block_of(width, heads, True)
        for size in range(1, 17):
            if heads % size == 0 and width % size == 0:
                assert width // size % block == 0, (width, heads, size)


def test_wrong_products_are_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """vpmaddubsw adds pairs with saturation to 16 bits, and would give such products."""

    class Saturated:
        def __init__(self, codes: Any, *_: Any) -> None:
            self.codes = codes.astype(int)

        def add_up(self, rows: Any, peaks: Any, sums: Any, activation: str, isa: str, threads: int) -> None:
            unsigned = rows.astype(int)[:, None] + 128
            pairs = (unsigned * self.codes).reshape(len(rows), len(self.codes), -1, 2).sum(-1)
            added = (pairs.clip(-32768, 32767) if isa != "scalar" else pairs).sum(-1)
            sums[...] = added - 128 * self.codes.sum(-1)

    monkeypatch.setattr(kernels._sworker, "IntegerWeights", Saturated)
    monkeypatch.setattr(kernels, "PROOF_SHAPES", ((64, 5), (18, 1)))
    integer_isa.cache_clear()
    try:
        assert integer_isa() == "scalar"
        assert "wrong on this CPU" in caplog.text
        monkeypatch.setattr(kernels._sworker, "integer_isas", lambda: ["avx2"])
        integer_isa.cache_clear()
        with pytest.raises(ModelLoadError, match="no product of integers is exact"):
            integer_isa()
    finally:
        integer_isa.cache_clear()


@pytest.mark.parametrize(("limit", "isa"), [("scalar", "scalar"), ("avx2", "avx2"), ("avx512_amx", ISAS[-1])])
def test_an_instruction_set_can_be_forced(limit: str, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if isa not in ISAS:
        pytest.skip(f"this CPU has no {isa}")
    monkeypatch.setenv("FASTDECODE_ISA", limit)
    integer_isa.cache_clear()
    assert integer_isa() == isa
    integer_isa.cache_clear()


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"give one of int4, int8, unpack, .* not 'int3'"):
        EngineConfig(quantization="int3")


@cache
def folder_of(name: str, root: Path) -> Path:
    return model_zoo.save_model(name, root / name)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("zoo")


def loaded(name: str, root: Path, **settings: Any) -> tuple[SModel, Any]:
    given = {"quantization": "int8", "device": "cpu", "skip_tokenizer_init": True, **settings}
    model = SModel(EngineConfig(str(folder_of(name, root)), **given))
    return model, model._hf_config


@pytest.mark.slow
@pytest.mark.parametrize("name", MOST_USED)
def test_logits_are_those_of_the_oracle_and_rows_repeat(name: str, zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, hf_config = loaded(name, zoo)
    packed = [each for each in model.model.modules() if isinstance(getattr(each, "weight", None), PackedWeight)]
    assert len(packed) >= 6
    assert repeats_rows(model.code, hf_config, (1, 3, 16)) and model.code.least_rows == 1
    found = logits_of(model.code, hf_config)
    use_oracle(monkeypatch)
    assert torch.equal(found, logits_of(model.code, hf_config))


def use_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IntegerProduct, "compute", integer_oracle.compute)
    monkeypatch.setattr(ExpertProducts, "_multiplied", integer_oracle.experts_multiplied)
    monkeypatch.setattr(LayerInTwoCalls, "__call__", integer_oracle.own_layer)


def logits_of(code: ModelCode, hf_config: Any) -> torch.Tensor:
    from fastdecode.sworker.model import support

    return support._probe(code, hf_config)[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-gqa", "gemma2", "qwen3_moe"])
def test_tokens_are_those_of_the_oracle(name: str, zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy tokens are equal, with the R-worker's attention in both."""
    prompts = [{"prompt_token_ids": each[:40]} for each in model_zoo.prompts(name)[:4]]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    given = {"device": "cpu", "skip_tokenizer_init": True, "kv_cache_memory": "64MiB", "s_threads": 1, "r_threads": 1}
    found = []
    for replaced in (False, True):
        if replaced:
            use_oracle(monkeypatch)
        with LLM(str(folder_of(name, zoo)), quantization="int8", **given) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found.append([list(each.outputs[0].token_ids) for each in outputs])
    assert found[0] == found[1]
    assert len({token for tokens in found[0] for token in tokens}) > 10


@pytest.mark.slow
def test_gated_layers_are_found_and_no_weight_is_unpacked_again(zoo: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Unpacking would take longer than all else at load, and double the peak of memory."""
    with caplog.at_level(logging.DEBUG):
        for name in ("llama-gqa", "gemma2", "phi3"):
            caplog.clear()
            loaded(name, zoo)
            assert f"{model_zoo.RECIPES[name].settings['num_hidden_layers']} gated layers in two calls" in caplog.text
            assert "unpacks a packed weight" not in caplog.text


@pytest.mark.slow
def test_published_codes_are_kept(zoo: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every layer multiplies the codes of a W8A8 checkpoint of compressed-tensors, not rotated."""
    plain, tensors = folder_of("llama-gqa", zoo), {}
    codes = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        tensors[name] = tensor
        if name.endswith("_proj.weight"):
            scales = tensor.abs().amax(1, keepdim=True) / 100  # The scale is one that this project would not choose.
            tensors[name] = codes[name] = (tensor / scales).round().to(torch.int8)
            tensors[f"{name}_scale"] = scales
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    each = {"num_bits": 8, "type": "int", "symmetric": True}
    rows = each | {"strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": each | {"strategy": "channel"}, "input_activations": rows}
    settings = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": group}}
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": settings}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with caplog.at_level(logging.DEBUG):
        model = SModel(EngineConfig(str(tmp_path), quantization="int8", device="cpu", skip_tokenizer_init=True))
    assert f"{len(codes)} of them as the checkpoint has them" in caplog.text
    assert "unpack" not in caplog.text  # the peak of memory would be twice what stays
    for name, own in codes.items():
        found = dict(model.model.named_parameters())[name]
        assert isinstance(found, PackedWeight)
        assert torch.equal(found + 0, own.float() * tensors[f"{name}_scale"])
