"""Rows have the same bits in forwards of any size, attention apart; recomputation and batches rely on it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from fastdecode.api.config import EngineConfig
from fastdecode.sworker import SModel
from fastdecode.sworker.adapters.experts import EXPERTS_NAME
from fastdecode.sworker.model.loader import load_hf_config
from fastdecode.sworker.model.support import repeats_rows

EXPERTS = {"hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIGS = {
    "dense": transformers.LlamaConfig(**EXPERTS, intermediate_size=512, vocab_size=500),
    "two of 8 experts": transformers.MixtralConfig(**EXPERTS, intermediate_size=512, vocab_size=500),
    "three of 30 experts": transformers.Qwen3MoeConfig(
        **EXPERTS, moe_intermediate_size=128, num_experts=30, num_experts_per_tok=3, vocab_size=500
    ),
}


def load(name: str, dtype: str, folder: Path) -> tuple[SModel, EngineConfig]:
    CONFIGS[name].save_pretrained(folder)
    config = EngineConfig(str(folder), device="cpu", dtype=dtype, load_format="dummy", skip_tokenizer_init=True)
    return SModel(config), config


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_rows_repeat(name: str, dtype: str, tmp_path: Path) -> None:
    model, config = load(name, dtype, tmp_path)
    assert repeats_rows(model.code, load_hf_config(config))


def test_a_model_whose_rows_do_not_repeat_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, x: x @ self.weight.T * (1 + 1e-6 * (x.shape[1] > 16)))
    monkeypatch.setattr("fastdecode.sworker.model.transformers_code.PackedLinears", lambda model: None)
    load("dense", "float32", tmp_path)
    assert "float32 products give a row other bits" in caplog.text


def test_experts_get_enough_rows_and_the_same_results(tmp_path: Path) -> None:
    """The results are those of transformers' grouped products, within rounding, for any number of rows."""
    experts = load("three of 30 experts", "float32", tmp_path)[0].model.model.layers[0].mlp.experts
    assert experts.config._experts_implementation == EXPERTS_NAME
    generator = torch.Generator().manual_seed(0)
    for num_rows in (1, 2, 7, 50, 400):
        rows = torch.randn(num_rows, 256, generator=generator)
        weights, index = torch.randn(num_rows, 30, generator=generator).softmax(-1).topk(3)
        found = experts(rows, index, weights)
        experts.config._experts_implementation = "grouped_mm"
        wanted = experts(rows, index, weights)
        experts.config._experts_implementation = EXPERTS_NAME
        assert found.shape == wanted.shape and torch.allclose(
            found, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max())
        )


@pytest.mark.parametrize(
    ("name", "threads"),
    [
        ("two of 8 experts", 1),
        ("three of 30 experts", 2),
        pytest.param("two of 8 experts", 2, marks=pytest.mark.thorough),
        pytest.param("three of 30 experts", 1, marks=pytest.mark.thorough),
    ],
)
def test_a_row_of_experts_has_the_same_bits_in_any_company(name: str, threads: int, tmp_path: Path) -> None:
    """Also with several threads, each of which gets some of an expert's rows."""
    experts = load(name, "float32", tmp_path)[0].model.model.layers[0].mlp.experts
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(96, 256, generator=generator)
    k = CONFIGS[name].num_experts_per_tok
    weights, index = torch.randn(96, experts.num_experts, generator=generator).softmax(-1).topk(k)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = experts(rows, index, weights)
        for count in range(1, 50, 1 if threads == 1 else 3):  # threads that wait take most of this test's time
            assert torch.equal(experts(rows[:count], index[:count], weights[:count]), together[:count]), count
    finally:
        torch.set_num_threads(before)
