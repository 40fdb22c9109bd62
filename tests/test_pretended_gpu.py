"""Model code on a pretended GPU: torch's device "meta" computes nothing, and refuses tensors of another device.

So a tensor that an adapter makes on the CPU, or a number that it reads back, is found without a GPU. A model whose own
code reads numbers back runs there without graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import latent_zoo, model_zoo, sparse_zoo, tiny_hybrids
from helpers.packed_checkpoints import FORMATS, Format, saved

from fastdecode.api.config import EngineConfig
from fastdecode.core.step import Chunk, MiniBatch
from fastdecode.kinds import Recurrent
from fastdecode.sworker.adapters import latents
from fastdecode.sworker.adapters.calls import DENSE, Calls
from fastdecode.sworker.adapters.index import BlockIndexer, TokenIndexer
from fastdecode.sworker.model import held, loader
from fastdecode.sworker.model.support import probe_layout
from fastdecode.sworker.model.transformers_code import TransformersCode
from fastdecode.sworker.run.pipeline import MiniBatchForward, ModelGreenlet
from fastdecode.sworker.run.prompt_scratch import PromptScratch
from fastdecode.sworker.run.staging import pack

pytestmark = pytest.mark.slow

GPU = torch.device("meta")
HYBRIDS = ("qwen3_next", "kimi_linear", "olmo_hybrid", "nemotron_h", "granitemoehybrid", "bamba", "falcon_h1", "zamba2",
           "jamba", "zamba", "minimax", "recurrent_gemma", "lfm2_moe")  # fmt: skip
OWN = ("codegen", "gpt_neo", "gpt_neox_japanese", "xglm")
BUILDERS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(model_zoo.ARCHITECTURES, model_zoo.build_model),
    **dict.fromkeys(latent_zoo.CONFIGS, latent_zoo.build_model),
    **dict.fromkeys(sparse_zoo.CONFIGS, sparse_zoo.build_model),
    **dict.fromkeys((*HYBRIDS, *OWN), tiny_hybrids.built),
}
READS_BACK = ("longcat_flash",)
"""Models whose own code asks which experts have rows."""

EVERY_TIME = ("llama-gqa", "gemma2", "gpt_oss", "bloom", "deepseek_v3", "deepseek_v32", "minimax_m3", "qwen3_next",
              "nemotron_h", "zamba", "gpt_neo")  # fmt: skip
NAMES = [name if name in EVERY_TIME else pytest.param(name, marks=pytest.mark.thorough)
         for name in BUILDERS if name not in READS_BACK]  # fmt: skip


def loaded(folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> TransformersCode:
    """The model as the loader leaves it on a GPU. Numbers that nobody computes are taken for equal."""
    with monkeypatch.context() as patched:
        patched.setattr(loader, "resolve_device", lambda name: GPU)
        patched.setattr(latents, "equal_within_rounding", lambda *_: True)
        patched.setattr(torch, "equal", lambda *_: True)
        config = EngineConfig(str(folder), skip_tokenizer_init=True, dtype="bfloat16", **settings)
        hf_config = loader.load_hf_config(config)
        return TransformersCode(loader.place_model(config, hf_config, loader.load_model(config, hf_config), None))


def decoded(code: TransformersCode) -> torch.Tensor:
    """The logits of 16 decodes, whose attention answers zeros on the GPU."""

    def answer(module: Any, query: Any, key: Any, value: Any, *_: Any, calls: Calls = DENSE, **__: Any) -> Any:
        assert {each.device for each in (query, key, value)} == {GPU}
        return query.new_zeros((query.shape[2], *calls.output(query, key, value)))[None]

    ids = torch.arange(16, device=GPU)[None]
    with torch.inference_mode():
        logits: torch.Tensor = ModelGreenlet(lambda: code.logits(ids, ids + 5, ids[0]), answer).switch()
    return logits


class Answers:
    """A staging area whose R-workers answer zeros on the GPU."""

    def __init__(self, layout: Any) -> None:
        self.layers, self.sent = layout.layers, 0

    def send(self, mini_batch: int, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        assert {each.device for each in (q, k, v)} == {GPU}
        self.sent += 1
        self.o = q.new_zeros((len(q), *self.layers[layer].row_shapes[3]))


@pytest.mark.parametrize("name", NAMES)
def test_decodes_and_prompts_stay_on_the_gpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the first and the last chunk of a prompt, which attend by torch, among decodes."""
    model = BUILDERS[name](name)
    model.config.save_pretrained(tmp_path)
    code = loaded(tmp_path, monkeypatch, load_format="dummy")
    if name in sparse_zoo.CONFIGS:
        indexers = [
            each.indexer
            for each in code.module.modules()
            if isinstance(getattr(each, "indexer", None), torch.nn.Module)
        ]
        assert indexers and all(isinstance(each, TokenIndexer | BlockIndexer) for each in indexers)
    assert decoded(code).device == GPU
    on_cpu = EngineConfig(str(tmp_path), skip_tokenizer_init=True, load_format="dummy", device="cpu", dtype="bfloat16")
    hf_config = loader.load_hf_config(on_cpu)
    layout = probe_layout(TransformersCode(loader.load_model(on_cpu, hf_config)), hf_config, "auto")
    if any(isinstance(layer, Recurrent) for layer in layout.layers):
        return  # prompts of hybrids run on R-workers
    scratch, answers = PromptScratch(layout), Answers(layout)
    for start, last in ((0, False), (20, True)):
        chunks = [Chunk(1, 0, 5, (7,)), Chunk(2, 0, start, range(20), False, last, last, False)]
        packed = pack(MiniBatch.of(chunks), torch.device("cpu"))
        there = {each: getattr(packed, each).to(GPU) for each in ("input_ids", "position_ids", "logits_rows")}
        scratch.begin_step(())
        forward: Any = MiniBatchForward(0, replace(packed, **there), code, None, scratch, answers)  # type: ignore[arg-type]
        with torch.inference_mode():
            logits = forward.own_greenlet.switch()
            while not forward.own_greenlet.dead:
                logits = forward.own_greenlet.switch(answers.o)
        assert logits.device == GPU and len(logits) == 1 + last
    assert answers.sent == 2 * len(layout.layers)


@pytest.mark.parametrize("name", READS_BACK)
def test_what_is_read_back_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail: reading a number raises on this device."""
    BUILDERS[name](name).config.save_pretrained(tmp_path)
    with pytest.raises(NotImplementedError):
        decoded(loaded(tmp_path, monkeypatch, load_format="dummy"))


MIXTURES: dict[str, Format] = {
    "fp8": FORMATS["fp8"],
    "mxfp4": FORMATS["mxfp4"],
    "int4": ("qwen3_moe", *FORMATS["int4"][1:]),
    "awq": ("mixtral", *FORMATS["awq"][1:]),
}


@pytest.mark.parametrize("kind", MIXTURES)
def test_packed_experts_are_unpacked_there(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a layer at once, without asking which have rows."""
    _, packed = saved("mxfp4" if kind == "mxfp4" else "fp8", tmp_path, "", MIXTURES[kind])
    code = loaded(packed, monkeypatch, quantization=MIXTURES[kind][2]["quant_method"])
    code.module.to(GPU)
    assert held.bits_of(code.module) > 0 and decoded(code).device == GPU
