"""Decoder layers in two calls give the bits of the layers' own code, and only layers that they cover are replaced."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import model_zoo
from helpers.integer_oracle import own_layer
from helpers.model_zoo import POSITIONS, RECIPES, Recipe, llama_like

from fastdecode import _sworker
from fastdecode.api.config import EngineConfig
from fastdecode.sworker import SModel
from fastdecode.sworker.model.recorder import Recorder
from fastdecode.sworker.products.layers import LayerInTwoCalls
from fastdecode.sworker.run.pipeline import ModelGreenlet
from fastdecode.sworker.run.staging import to_numpy

OTHERS = {
    "gemma": Recipe("GemmaConfig", 0.15, 2, llama_like(head_dim=32)),
    "phi3-partial": Recipe(
        "Phi3Config", 0.15, 1, llama_like(original_max_position_embeddings=POSITIONS, partial_rotary_factor=0.5)
    ),
}
"""Models like Llama that only these tests need."""


@pytest.fixture(autouse=True)
def others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, recipe in OTHERS.items():
        monkeypatch.setitem(RECIPES, name, recipe)


def loaded(name: str, root: Path, **settings: Any) -> SModel:
    given = {"quantization": "int8", "device": "cpu", "skip_tokenizer_init": True, **settings}
    return SModel(EngineConfig(str(model_zoo.save_model(name, root / name)), **given))


def layers_of(model: SModel) -> list[LayerInTwoCalls]:
    forms = (vars(module).get("forward") for module in model.model.modules())
    return [form for form in forms if isinstance(form, LayerInTwoCalls)]


def forward_of(model: SModel, num_rows: int) -> list[torch.Tensor]:
    """Return the logits of ``num_rows`` rows, then all q, k and v of the forward."""
    sent: list[torch.Tensor] = []

    def answer(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        sent.extend(each.clone() for each in (query, key, value))
        return Recorder.answer(module, query, key, value, *args, **kwargs)

    ids = torch.arange(num_rows) * 31 % model.vocab_size
    with torch.inference_mode():
        running = ModelGreenlet(partial(model.code.logits, ids[None], torch.arange(num_rows)[None] * 3), answer)
        return [running.switch(), *sent]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama-gqa", "mistral", "qwen2", "qwen3", "gemma", "phi3", "phi3-partial"])
def test_bits_are_those_of_the_layers_own_code(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bits agree with and without biases, per-head norms and packed projections, for 1, 5 and 40 rows, on 1 thread too.

    Layers with partial rotary embeddings run their own code.
    """
    model = loaded(name, tmp_path, dtype=dtype)
    assert len(layers_of(model)) == RECIPES[name].settings["num_hidden_layers"]
    counts, threads = (1, 5, 40), torch.get_num_threads()
    found = [forward_of(model, count) for count in counts]
    torch.set_num_threads(1)
    alone = forward_of(model, counts[-1])
    torch.set_num_threads(threads)
    monkeypatch.setattr(LayerInTwoCalls, "__call__", own_layer)
    for count, rows in zip(counts, found, strict=True):
        own = forward_of(model, count)
        assert len(own) == len(rows) > 3
        assert all(map(torch.equal, rows, own))
    assert all(map(torch.equal, alone, found[-1]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2", "qwen3_moe", "opt"])
def test_layers_with_other_parts_keep_their_own_code(name: str, tmp_path: Path) -> None:
    """Layers with four norms, with experts or without a gate are not replaced."""
    assert layers_of(loaded(name, tmp_path)) == []


@pytest.mark.slow
def test_a_layer_that_computes_otherwise_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts are a Llama layer's, but the layer scales what it adds, or hands its attention's output to a hook."""
    from transformers.models.llama import modeling_llama as llama

    own = llama.LlamaDecoderLayer.forward
    monkeypatch.setattr(llama.LlamaDecoderLayer, "forward", lambda *args, **kwargs: own(*args, **kwargs) * 1.01)
    assert layers_of(loaded("llama-gqa", tmp_path)) == []
    monkeypatch.undo()
    build = llama.LlamaDecoderLayer.__init__

    def build_hooked(self: Any, *args: Any) -> None:
        build(self, *args)
        self.self_attn.register_forward_hook(lambda *_: None)

    monkeypatch.setattr(llama.LlamaDecoderLayer, "__init__", build_hooked)
    assert layers_of(loaded("llama-gqa", tmp_path)) == []


def weights(columns: int, width: int) -> _sworker.IntegerWeights:
    return _sworker.IntegerWeights(np.ones((columns, width), np.int8), np.ones(columns, np.float32), None, width, 1)


def layer(heads: int = 4, **changes: Any) -> _sworker.IntegerLayer:
    """Return a layer of hidden size 32 with two KV heads of 8 elements, with ``changes`` to its parts."""
    norm, none = (np.ones(32, np.float32), 1e-6, True), (np.empty(0, np.float32), 0.0, False)
    parts: dict[str, Any] = {"qkv": weights(64, 32), "o": weights(32, 32), "gate_up": weights(128, 32)}
    parts |= {"down": weights(32, 64), "input_norm": norm, "post_norm": norm, "q_norm": none, "k_norm": none}
    return _sworker.IntegerLayer(**parts | changes, heads=heads, kv_heads=2, activation="silu")


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"heads": 3}, "heads must divide"),
        ({"qkv": weights(96, 32)}, "columns of all heads"),
        ({"o": weights(64, 32)}, "as wide as x"),
        ({"down": weights(32, 32)}, "gate and up"),
        ({"input_norm": (np.ones(16, np.float32), 1e-6, True)}, "norms must be as wide"),
        ({"q_norm": (np.ones(4, np.float32), 1e-6, True)}, "as wide as a head"),
    ],
)
def test_parts_that_do_not_fit_are_refused(changes: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        layer(**changes)


def test_rows_that_do_not_fit_are_refused() -> None:
    x, angles, q, k = (np.zeros(shape, np.float32) for shape in ((3, 32), (3, 8), (3, 4, 8), (3, 2, 8)))
    one, isa = layer(), _sworker.integer_isas()[-1]
    one.before(x, angles, angles, q, k, k.copy(), isa, 1)
    one.after(x, x, x.copy(), isa, 1)
    with pytest.raises(ValueError, match="cos and sin"):
        one.before(x, angles[:2], angles[:2], q, k, k, isa, 1)
    with pytest.raises(ValueError, match="k and v must be"):
        one.before(x, angles, angles, q, q, k, isa, 1)
    with pytest.raises(ValueError, match="o must be"):
        one.after(x, x[:, :16].copy(), x.copy(), isa, 1)
    with pytest.raises(ValueError, match="x must be"):
        one.before(x[:, :16].copy(), angles, angles, q, k, k, isa, 1)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_in_arrays_gives_the_bits_of_attention_in_tensors(dtype: str, tmp_path: Path) -> None:
    """Greenlets that take arrays get the same bits; two forwards that alternate keep their q, k and v apart."""
    model = loaded("llama-gqa", tmp_path, dtype=dtype)
    counts = (3, 5)
    wanted = [forward_of(model, count) for count in counts]
    sent: list[list[np.ndarray]] = [[], []]

    def forward(turn: int) -> ModelGreenlet:
        def attend_rows(*qkv: np.ndarray) -> np.ndarray:
            greenlets[turn].parent.switch()
            sent[turn].extend(each.copy() for each in qkv)
            return qkv[2].repeat(qkv[0].shape[1] // qkv[2].shape[1], axis=1)

        ids = torch.arange(counts[turn]) * 31 % model.vocab_size
        run = partial(model.code.logits, ids[None], torch.arange(counts[turn])[None] * 3)
        return ModelGreenlet(run, refuse, attend_rows)

    greenlets = [forward(0), forward(1)]
    with torch.inference_mode():
        results: list[Any] = [None, None]
        while not all(each.dead for each in greenlets):
            results = [each.switch() if not each.dead else old for each, old in zip(greenlets, results, strict=True)]
    for turn, (logits, *tensors) in enumerate(wanted):
        assert torch.equal(results[turn], logits)
        assert len(sent[turn]) == len(tensors)
        for found, own in zip(sent[turn], tensors, strict=True):
            assert np.array_equal(found, to_numpy(own[0].transpose(0, 1)))


def refuse(*args: Any, **kwargs: Any) -> torch.Tensor:
    raise AssertionError("a layer in two calls passed tensors although arrays were asked for")
