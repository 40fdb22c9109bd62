"""Weights that stay packed answer as unpacked ones, and no adapter reads a layer's weight."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import latent_zoo, model_zoo, sparse_zoo, tiny_hybrids
from helpers.examples import thinned
from helpers.packed_checkpoints import FORMATS, Format, fp8, saved

from fastdecode import LLM, SamplingParams
from fastdecode.api.config import EngineConfig
from fastdecode.core.errors import ConfigError
from fastdecode.sworker.model import held, loader, packing
from fastdecode.sworker.model.formats import Layout
from fastdecode.sworker.model.kept import KeptLinear
from fastdecode.sworker.model.kept_experts import SomeExperts
from fastdecode.sworker.model.loader import load_hf_config

CPU, GPU = torch.device("cpu"), torch.device("cuda")
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
SETTINGS: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 256}
SETTINGS |= {"kv_cache_memory": "16MiB", "s_threads": 1, "r_threads": 1}
PROMPTS = tiny_hybrids.random_prompts((40, 1, 23))


def float8(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return compressed-tensors' "float-quantized" form: FP8 with a scale per output."""
    scales = (weight.abs().amax(1, keepdim=True) / 448).bfloat16().float()
    numbers = (weight / scales).to(torch.float8_e4m3fn)
    return {name: numbers, name + "_scale": scales}, numbers.float() * scales


def blocked(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """compressed-tensors' FP8 with a scale per block, which the sizes are no multiples of."""
    packed, plain = fp8(name, weight, block=(24, 40))
    return {each.replace("_scale_inv", "_scale"): tensor for each, tensor in packed.items()}, plain


BLOCKED = {"weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [24, 40]}}
KEPT: dict[str, Format] = {
    "blocks": (
        "llama",
        blocked,
        {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": BLOCKED}},
    ),
    **{kind: FORMATS[kind] for kind in ("awq", "gptq", "int4", "int8")},
    "fp8": ("qwen3", partial(fp8, block=(24, 40)), {"quant_method": "fp8", "weight_block_size": [24, 40]}),
    "float8": ("llama", float8, {"quant_method": "compressed-tensors", "format": "float-quantized"}),
}


def texts(folder: Path, **settings: Any) -> list[list[int]]:
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    with LLM(str(folder), **SETTINGS | settings) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert ("quantization" in settings) == (held.bits_of(llm.engine.s_model.model) > 0)
    return [list(output.outputs[0].token_ids) for output in outputs]


def some_thorough(names: Iterable[str], *thorough: str) -> list[Any]:
    """Return ``names`` as parameters; ``make test-all`` alone runs those that are ``thorough``."""
    return [pytest.param(name, marks=[pytest.mark.thorough] * (name in thorough)) for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("kind", some_thorough(KEPT, "awq", "gptq"))  # layers of experts have these
def test_packed_weights_answer_as_those_unpacked(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Layers of six formats unpack the same numbers, so the tokens are the same."""
    plain, packed = saved("fp8" if kind == "fp8" else "int8", tmp_path, "", KEPT[kind])
    method = KEPT[kind][2]["quant_method"]
    wanted = texts(plain)
    assert len({token for each in wanted for token in each}) > 8
    with caplog.at_level(logging.WARNING):
        assert texts(packed) == wanted
        assert f"{method} are unpacked to float32: this CPU multiplies plain weights faster" in caplog.text
        caplog.clear()
        assert texts(packed, quantization=method) == wanted
    assert f"weights in {method} stay packed" in caplog.text and "each layer unpacks its weight" in caplog.text


def kept_model(folder: Path, method: str) -> Any:
    config = EngineConfig(str(folder), device="cpu", skip_tokenizer_init=True, quantization=method)
    return loader.load_model(config, load_hf_config(config))


@pytest.mark.slow
def test_memory_counts_packed_bytes(tmp_path: Path) -> None:
    """A model whose packed numbers differ in one place has another digest."""
    plain, packed = saved("int8", tmp_path, "", KEPT["awq"])
    model = kept_model(packed, "awq")
    linears = [each for each in model.modules() if isinstance(each, KeptLinear)]
    sizes = sum(each.in_features * each.out_features for each in linears)
    kept_bytes = sum(part.nbytes for each in linears for part in each.buffers())
    assert len(linears) >= 28 and held.bits_of(model) == 8 * kept_bytes / sizes < 7
    config = EngineConfig(str(plain), device="cpu", skip_tokenizer_init=True)
    unpacked = loader.load_model(config, load_hf_config(config))
    assert held.bits_of(unpacked) == 0
    item = next(unpacked.parameters()).element_size()
    assert held.weight_bytes(unpacked) - held.weight_bytes(model) == sizes * item - kept_bytes
    before = held.weights_digest(model)
    linears[3].packed_qweight[0, 0] += 1
    assert held.weights_digest(model) != before


def uneven(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Format "int4" for all experts but one, so that the experts of a layer cannot be stacked."""
    return ({name: weight}, weight) if ".experts.1." in name else FORMATS["int4"][1](name, weight)


@pytest.mark.slow
def test_experts_packed_in_part_are_unpacked_with_the_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, packed = saved("fp8", tmp_path, "", (*MIXTURES["qwen3_moe-int4"][:1], uneven, FORMATS["int4"][2]))
    with caplog.at_level(logging.WARNING):
        kept_model(packed, "compressed-tensors")
    assert "are unpacked to float32: some experts of model.layers.0.mlp.experts" in caplog.text


MIXTURES: dict[str, Format] = {
    "deepseek_v3-fp8": FORMATS["fp8"],
    "gpt_oss-mxfp4": FORMATS["mxfp4"],
    "qwen3_moe-int4": ("qwen3_moe", *FORMATS["int4"][1:]),
    "qwen3_moe-gptq": ("qwen3_moe", *FORMATS["gptq"][1:]),
    "mixtral-awq": ("mixtral", *FORMATS["awq"][1:]),
    "qwen2_moe-fp8": ("qwen2_moe", partial(fp8, block=(8, 8)), {"quant_method": "fp8", "weight_block_size": [8, 8]}),
    "olmoe-int8": ("olmoe", *FORMATS["int8"][1:]),
}
"""Mixtures of experts by format: blocks that cross experts' borders and some that do not, stacked in files or not."""


@pytest.mark.slow
@pytest.mark.parametrize("name", some_thorough(MIXTURES, "qwen3_moe-int4", "qwen2_moe-fp8", "olmoe-int8"))
def test_packed_experts_answer_as_those_unpacked(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The same grouped products over the same numbers, so the tokens are the same, by chosen experts and by all."""
    kind = "mxfp4" if name.endswith("mxfp4") else "fp8"
    _, packed = saved(kind, tmp_path, "", MIXTURES[name])
    method = MIXTURES[name][2]["quant_method"]
    wanted = texts(packed)
    assert len({token for each in wanted for token in each}) > 8
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert texts(packed, quantization=method) == wanted
    assert f"weights in {method} stay packed" in caplog.text
    model, plain = kept_model(packed, method), plain_model(packed)
    layers = [each for each in model.modules() if "kept_experts" in vars(each)]
    assert layers and not any(each._parameters.get("down_proj") is not None for each in layers)
    own = dict(plain.named_modules())
    for place, module in model.named_modules():
        if "kept_experts" in vars(module):
            assert_alike(module, own[place])
    item = next(plain.parameters()).element_size()
    assert held.weight_bytes(plain) - held.weight_bytes(model) > sum(map(held.num_weights, layers)) * (item - 1.5)


def assert_alike(kept: Any, plain: Any) -> None:
    """Hold the weights of all experts, unpacked at once as a GPU needs them, against the unpacked parameters."""
    every = SomeExperts(kept, vars(kept)["kept_experts"]._parts, torch.float32, None)
    some = SomeExperts(kept, vars(kept)["kept_experts"]._parts, torch.float32, torch.tensor([0, kept.num_experts - 1]))
    for name in vars(kept)["kept_experts"]._parts:
        assert torch.equal(getattr(every, name), plain._parameters[name])
        assert torch.equal(getattr(some, name), plain._parameters[name][[0, -1]])


def plain_model(folder: Path) -> Any:
    config = EngineConfig(str(folder), device="cpu", skip_tokenizer_init=True)
    return loader.load_model(config, load_hf_config(config))


def forms(folder: Path, device: torch.device = CPU, **settings: Any) -> packing.Packing:
    config = EngineConfig(str(folder), skip_tokenizer_init=True, **settings)
    return packing.choose(config, load_hf_config(config), device)


def test_what_stays_packed_where(tmp_path: Path) -> None:
    """A GPU keeps all that can be packed, and the CPU what is asked for; ranks and adapters need plain weights."""
    plain, packed = saved("int8", tmp_path, "", KEPT["gptq"])
    adapter = {"lora_modules": [f"a={tmp_path}"]}
    assert forms(plain).how == forms(plain, GPU).how == "plain"
    assert forms(packed).how == "unpacked" and forms(packed, GPU).how == "ours"
    assert forms(packed, quantization="gptq").how == "ours" and "gptqmodel" in forms(packed, GPU).why
    for reason, settings in (
        ("ranks cut", {"tensor_parallel_size": 2}),
        ("unpack was given", {"quantization": "unpack"}),
        ("random weights", {"load_format": "dummy"}),
        ("adapter", adapter),
    ):
        form = forms(packed, GPU, **settings)
        assert form.how == "unpacked" and reason in form.why


@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_kernels_that_nobody_can_fetch_leave_weights_in_layers_of_ours(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading would fail later, on a host with all packages and no way to the hub."""

    def fails(*_: Any, **__: Any) -> Any:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(packing, "find_spec", lambda name: object())
    monkeypatch.setattr(packing, "get_kernel", fails)
    monkeypatch.setattr(packing, "lazy_load_kernel", fails)
    why = packing.why_not_theirs({"quant_method": method}, GPU)
    assert why == "transformers cannot fetch its kernels from the hub (ConnectionError)"


@pytest.mark.parametrize(
    ("which", "device", "asked", "reason"),
    [
        ("packed", CPU, "awq", "is packed in gptq, not in awq: leave it out"),
        ("plain", CPU, "gptq", "is not packed, not in gptq"),
        ("plain", CPU, "int4", "int4 is torchao's, for a GPU"),
        ("packed", GPU, "int8", "int8 quantizes plain weights on a GPU, and .* is packed in gptq already"),
    ],
)
def test_what_cannot_be_asked_for(which: str, device: torch.device, asked: str, reason: str, tmp_path: Path) -> None:
    folders = dict(zip(("plain", "packed"), saved("int8", tmp_path, "", KEPT["gptq"]), strict=True))
    with pytest.raises(ConfigError, match=reason):
        forms(folders[which], device, quantization=asked)


class TestTorchao:
    """transformers' own quantizer stays in place, which torchao has on the CPU too."""

    @pytest.fixture(autouse=True)
    def _torchao(self) -> None:
        pytest.importorskip("torchao", reason="needs the extra 'packed'")

    @pytest.mark.slow
    def test_a_checkpoint_of_torchao_stays_packed(self, tmp_path: Path) -> None:
        """The products are those of transformers with the same modules, so the tokens are equal."""
        import transformers

        model_zoo.save_model("llama-gqa", tmp_path / "plain")
        made = transformers.TorchAoConfig(packing.torchao_config("int8", torch.nn.Module(), CPU))
        load = partial(transformers.AutoModelForCausalLM.from_pretrained, dtype=torch.float32)
        load(tmp_path / "plain", quantization_config=made).save_pretrained(tmp_path / "packed")
        with LLM(str(tmp_path / "packed"), **SETTINGS) as llm:
            assert 8 < held.bits_of(llm.engine.s_model.model) < 9.5
            outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], GREEDY, use_tqdm=False)
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        theirs = load(tmp_path / "packed").eval()
        assert [model_zoo.disagreements(theirs, *pair) for pair in zip(PROMPTS, tokens, strict=True)] == [0] * 3

    def test_a_gpu_quantizes_plain_weights(self, tmp_path: Path) -> None:
        """`--quantization int8`, here on the CPU, changes logits by no more than the format's error."""
        model = model_zoo.build_model("llama-gqa")
        ids = torch.tensor([PROMPTS[0]])
        with torch.inference_mode():
            wanted = model(ids).logits
            packing.quantize_dummy(model, "int8", CPU)
            found = model(ids).logits
        assert 8 < held.bits_of(model) < 9.5 and type(model.lm_head.weight) is torch.nn.Parameter
        apart = (found - wanted).norm() / wanted.norm()
        assert 0 < apart < 0.1

    def test_int4_takes_the_largest_group_that_fits(self) -> None:
        model = torch.nn.ModuleDict({"a": torch.nn.Linear(256, 8), "b": torch.nn.Linear(192, 8)})
        assert packing.torchao_config("int4", model, GPU).group_size == 64
        model["c"] = torch.nn.Linear(40, 8)
        with pytest.raises(ConfigError, match="rows are multiples of 32: give int8"):
            packing.torchao_config("int4", model, GPU)


OWN_ATTENTION = ("codegen", "gpt_neo", "gpt_neox_japanese", "megatron-bert", "rembert", "xglm")
BLIND = {
    **dict.fromkeys(("bloom", "falcon", "falcon-40b", "gptj", "mpt", "llama-gqa"), model_zoo.build_model),
    **dict.fromkeys(OWN_ATTENTION, tiny_hybrids.built),
    "minicpm3": latent_zoo.build_model,
    "glm_moe_dsa": sparse_zoo.build_model,
    "qwen3_next": tiny_hybrids.built,
    "lfm2": tiny_hybrids.built,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", thinned(list(BLIND), 2))
def test_adapters_look_at_no_weights(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear layers without an attribute ``weight``, as packed ones are, answer as plain ones do."""
    BLIND[name](name).save_pretrained(tmp_path)
    wanted = texts(tmp_path)
    own, hidden = loader.packing.unpacked, []

    def hide(model: Any) -> Any:
        for module in list(model.modules()):
            for child, each in list(module.named_children()):
                # transformers reads the dtype of this weight.
                if isinstance(each, torch.nn.Linear) and child != "weights_proj":
                    layer = KeptLinear(each, Layout(lambda own, dtype: own["codes"], {}), {"codes": each.weight})
                    layer.packed_codes = each.weight.data
                    setattr(module, child, layer)
                    hidden.append(child)
        return own(model)

    monkeypatch.setattr(loader.packing, "unpacked", hide)
    monkeypatch.setattr(held, "bits_of", lambda model: 0.0)
    assert texts(tmp_path) == wanted and len(hidden) > 4
