"""Shapes of built-in names and of configuration files, against published parameter counts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import latent_zoo, model_zoo, sparse_zoo
from helpers.tiny_configs import tiny_config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from fastdecode.api.config import EngineConfig
from fastdecode.api.engine_fields import DEMO_MODEL
from fastdecode.core.dtypes import KV_BITS
from fastdecode.core.errors import ConfigError, ModelLoadError, UnsupportedModelError
from fastdecode.perfmodel.hardware import kernel_bytes_per_second
from fastdecode.perfmodel.host_r_part import host_r_part
from fastdecode.perfmodel.known_models import BUILT_IN
from fastdecode.perfmodel.model_config import find_shape, read_shape
from fastdecode.perfmodel.model_shape import ModelShape
from fastdecode.perfmodel.presets import find_cpu_host
from fastdecode.perfmodel.sizing import Workload
from fastdecode.sworker import SModel
from fastdecode.sworker.model.support import probe_layout
from fastdecode.sworker.model.transformers_code import TransformersCode
from fastdecode.sworker.run.pipeline import ATTENTION_NAME, register_attention

BILLIONS = {
    "llama-7b": "6.7", "llama-13b": "13.0", "llama-65b": "65.3", "llama-2-70b": "69.0", "llama-3-8b": "8.0",
    "llama-3-70b": "70.6", "mistral-7b": "7.2", "mixtral-8x7b": "46.7", "yi-34b": "34.4", "falcon-180b": "178.6",
    "opt-6.7b": "6.6", "opt-175b": "174.6", "falcon-7b": "6.9", "falcon-40b": "41.3",
    "deepseek-v3": "670.9", "kimi-k2": "1026.2", "llama-3.3-70b": "70.6", "mistral-small": "23.6",
    "qwen3-32b": "32.8", "qwen3-235b-a22b": "235.0", "gpt-oss-120b": "116.8", "deepseek-v3.2": "671.8",
    "glm-5": "743.8", "minimax-m3": "426.1", "llama-4-scout": "107.8", "llama-4-maverick": "400.7",
    "qwen3-next-80b-a3b": "79.6", "qwen3.5-397b-a17b": "396.2", "nemotron-h-8b": "8.1", "granite-4-h-small": "32.2",
    "kimi-linear-48b": "49.1",
}  # fmt: skip

PUBLISHED = {
    "mistral-small": (23.6, 23.6), "qwen3-32b": (32.8, 32.8), "llama-3.3-70b": (70.6, 70.6),
    "qwen3-235b-a22b": (235, 22), "gpt-oss-120b": (116.8, 5.7), "deepseek-v3.2": (671, 37), "glm-5": (744, 40),
    "minimax-m3": (428, 23), "llama-4-maverick": (400, 17), "qwen3.5-397b-a17b": (397, 17),
}  # fmt: skip
"""Billions of parameters, all and those active for a token, as the makers publish them.
MiniMax-M3's include its vision tower, and its active ones leave out the embeddings.
"""

LEFT_OUT = ("embed_positions", "wpe", "router", "mlp.gate.weight")
"""Names of weights that are not counted: learned positions, and the routers of experts."""

LLAMA: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 11008,
    "num_attention_heads": 32, "vocab_size": 32000, "torch_dtype": "float16",
}  # fmt: skip


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_models_have_their_parameters(name: str) -> None:
    assert f"{BUILT_IN[name].parameters / 1e9:.1f}" == BILLIONS[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_fit_those_published(name: str) -> None:
    shape, (total, active) = BUILT_IN[name], PUBLISHED[name]
    assert shape.parameters / 1e9 == pytest.approx(total, rel=0.005)
    embeddings = 2 * shape.head_parameters / 1e9
    assert active - 0.5 <= shape.active_parameters / 1e9 <= active + 0.5 + embeddings


MINIMAX_M3 = {
    "moe_layer_freq": [0] * 3 + [1] * 57,
    "sparse_attention_config": {"sparse_attention_freq": [0] * 3 + [1] * 57, "sparse_num_index_heads": 4},
}
"""Fields of the published file, which transformers' class renames."""


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("gpt-oss-120b", "gpt_oss", {}),
        ("mistral-small", "mistral3", {}),
        ("llama-4-scout", "llama4_text", {}),
        ("deepseek-v3", "deepseek_v3", {}),
        ("deepseek-v3.2", "deepseek_v32", {}),
        ("glm-5", "glm_moe_dsa", {}),
        ("minimax-m3", "minimax_m3_vl_text", MINIMAX_M3),
    ],
)
def test_built_in_shapes_are_those_of_transformers_own_configurations(name: str, kind: str, words: Any) -> None:
    """A built-in name has the shape of the configuration that transformers writes for its type."""
    config = CONFIG_MAPPING[kind](**words).to_dict()
    for each in (config, config | {"layer_types": None, "mlp_layer_types": None} | words if words else config):
        assert vars(replace(read_shape(each, name), max_context=0)) == vars(replace(BUILT_IN[name], max_context=0))


def test_an_index_is_held_and_scanned_and_picks_what_is_read() -> None:
    """A million tokens of MiniMax-M3 take 144 GB, of which a step reads 22 GB: three layers' rows and the index."""
    shape, tokens = BUILT_IN["minimax-m3"], 1 << 20
    held = shape.kv_bytes_per_token("bfloat16") * tokens
    read = held * shape.read_share("bfloat16", Workload(tokens, tokens - 1).read_share(shape.windows, shape.chunked))
    assert [round(held / 1e9), round(read / 1e9)] == [144, 22]
    assert read == pytest.approx(2048 * (3 * tokens + 57 * 2048) + 57 * 256 * tokens, rel=1e-4)
    sparse, host = BUILT_IN["deepseek-v3.2"], find_cpu_host("epyc-9654")
    whole, scan = (host_r_part(each, "bfloat16", host, 1e-12 if each is sparse else 1.0) for each in (shape, sparse))
    # 64 heads score each key of 256 bytes, so the scan is bound by arithmetic.
    assert whole.bound_by == "reads" and scan.bound_by == "arithmetic"
    assert scan.seconds_per_token == pytest.approx(256 / kernel_bytes_per_second("bfloat16", 64, host.cores))
    shared = CONFIG_MAPPING["glm_moe_dsa"](index_topk_freq=4).to_dict()
    assert read_shape(shared, "m").index == replace(BUILT_IN["glm-5"].index, num_layers=21)


def test_gates_of_outputs_are_counted() -> None:
    """Gates of outputs count as parameters; what mixes residual streams (64 rows per layer) does not."""
    model = sparse_zoo.build_model("hy_v4")
    named = [(name, each.numel()) for name, each in model.named_parameters() if each.dim() > 1 and "hc" not in name]
    shape = read_shape(model.config.to_dict(), "m")
    matrices = sum(size for name, size in named if not any(word in name for word in LEFT_OUT))
    # The shape has a mean layer's parameters in whole numbers.
    assert shape.parameters == pytest.approx(matrices, abs=3)


@pytest.mark.parametrize("name", ["deepseek_v32", "hy_v4", "minimax_m3_vl_text"])
def test_the_bytes_of_an_index_are_those_that_r_workers_are_told_of(name: str, tmp_path: Path) -> None:
    tiny_config(name).save_pretrained(tmp_path)
    given: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16", "device": "cpu"}
    model = SModel(EngineConfig(model=str(tmp_path), **given))
    assert model.shape.index and any(layer.ranks_tokens for layer in model.layout.layers)
    assert model.shape.kv_bytes_per_token("bfloat16") == model.layout.kv_bytes_per_token


def test_a_configuration_file_gives_the_built_in_shape(tmp_path: Path) -> None:
    """The file may be named by itself or by its folder; the case of a built-in name does not matter."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    assert vars(find_shape(str(path))) == vars(BUILT_IN["llama-7b"]) | {"name": str(path)}
    assert find_shape(str(tmp_path)).parameters == find_shape("LLaMA-7B").parameters


@pytest.mark.parametrize(
    "name",
    [
        "llama-gqa",
        "llama4_text",
        "opt",
        "gpt_bigcode",
        "mixtral",
        "qwen3_moe",
        "phi3",
        "qwen3",
        "gemma2",
        "falcon",
        "falcon-40b",
        "falcon-rw",
        "bloom",
        "mpt",
        "gptj",
    ],
)
def test_parameters_agree_with_the_model_itself(name: str) -> None:
    """The weight matrices of layers and head are counted in the module; vectors and learned positions are not."""
    model = model_zoo.build_model(name)
    shape = read_shape(model.config.to_dict(), name)
    named = [(n, p.numel()) for n, p in model.named_parameters() if p.dim() > 1]
    matrices = sum(size for name, size in named if not any(word in name for word in LEFT_OUT))
    assert shape.parameters == matrices


def test_kv_bytes_are_the_r_workers() -> None:
    """A cached row includes its scales: 132 bytes in int8, and in int4 88 of a key and 72 of a value."""
    shape = ModelShape("m", 2, 64, 64, 8, 2, 128, 100)
    per_row = {"float32": 512, "bfloat16": 256, "float16": 256, "int8": 132, "int4": 80}
    assert set(per_row) == set(KV_BITS)
    for dtype, row_bytes in per_row.items():
        assert shape.kv_layout(dtype).kv_bytes_per_token == 2 * 2 * 2 * row_bytes


def test_the_demo_model_is_read() -> None:
    assert (
        find_shape(str(DEMO_MODEL)).num_layers
        == json.loads((DEMO_MODEL / "config.json").read_text())["num_hidden_layers"]
    )


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_hidden_layers": None}, ModelLoadError, "no num_hidden_layers"),
        ({"num_hidden_layers": -3}, ModelLoadError, "num_layers must be"),
        ({"hidden_size": "wide"}, ModelLoadError, "cannot be right"),
        ({"num_key_value_heads": 5}, ModelLoadError, "5 KV heads"),
        ({"kv_lora_rank": 512}, ModelLoadError, "cannot be right: 'qk_nope_head_dim'"),
        ({"index_topk": 2048}, ModelLoadError, "cannot be right: 'index_n_heads'"),
        ({"quantization_config": {"bits": 4}}, UnsupportedModelError, "weights quantized by None"),
        ({"layer_types": ["linear_attention", "full_attention"]}, UnsupportedModelError, "a recurrent state .llama."),
        (
            {"model_type": "mamba2", "state_size": 128},
            UnsupportedModelError,
            "m: all layers are recurrent, so it has no KV",
        ),
        ({"model_type": "falcon_mamba", "state_size": 16}, UnsupportedModelError, "m: all layers are recurrent"),
        (
            {"model_type": "zamba", "layers_block_type": ["mamba", "hybrid"], "n_mamba_heads": 2},
            UnsupportedModelError,
            "a recurrent state .zamba. is not",
        ),
        ({"model_type": "zamba2"}, UnsupportedModelError, "a recurrent state .zamba2."),
        ({"model_type": "bert"}, UnsupportedModelError, "bert generates no text"),
        ({"architectures": ["BertForMaskedLM"]}, UnsupportedModelError, "BertForMaskedLM generates no text"),
        ({"is_encoder_decoder": True}, UnsupportedModelError, "encoder.decoder"),
        ({"num_kv_shared_layers": 10}, UnsupportedModelError, "layers that share a cache"),
        ({"sliding_window": "wide"}, ModelLoadError, "cannot be right: m: a window must be a whole number"),
        ({"kv_lora_rank": 8, "model_type": "dots3_note_text"}, UnsupportedModelError, "latents of several widths"),
        ({"layer_types": 5}, ModelLoadError, "layer_types must be a list of names, one per layer, not 5"),
        ({"layer_types": [["full_attention"]]}, ModelLoadError, "layer_types must be a list of names"),
        ({"text_config": 5}, ModelLoadError, "text_config must be a JSON object, not 5"),
    ],
)
def test_what_cannot_be_planned_is_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        read_shape(LLAMA | change, "m")


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "kimi_k25", "glm4_moe_lite", "minicpm3", "axk1"])
def test_latent_rows_and_weights_are_those_of_the_model(name: str) -> None:
    model = latent_zoo.build_model(name)
    shape = read_shape(model.config.to_dict(), name)
    text = [(n, p.numel()) for n, p in model.named_parameters() if p.dim() > 1 and "vision" not in n and "mm_" not in n]
    assert shape.parameters == sum(size for n, size in text if not any(word in n for word in LEFT_OUT))
    layer = shape.layer_layout
    assert (layer.num_kv_heads, layer.key_head_dim, layer.value_head_dim, layer.values_in_keys) == (1, 40, 32, True)
    assert shape.kv_layout("float16").kv_bytes_per_token == 3 * 40 * 2
    assert shape.kv_layout("int8").kv_bytes_per_token == 3 * (32 + 4 + 8 * 2)
    assert shape.kv_layout("int4").kv_bytes_per_token == 3 * (16 + 4 + 8 * 2)


def test_deepseek_v3_and_kimi_k2_as_published() -> None:
    """The models have 37 and 32 billion active parameters, and known bytes per cached row and per token on a link."""
    deepseek, kimi = BUILT_IN["deepseek-v3"], BUILT_IN["kimi-k2"]
    assert [round(shape.active_parameters / 1e9) for shape in (deepseek, kimi)] == [37, 33]
    for shape in (deepseek, kimi):
        assert shape.kv_layout("bfloat16").kv_bytes_per_token == 61 * 576 * 2
        assert shape.appending_row_bytes == 576 * 2
    assert deepseek.attending_row_bytes == 2 * (128 * (576 + 512) + 576)
    operations = (
        2 * deepseek.layer_layout.multiply_adds() / deepseek.layer_layout.kv_elements
    )  # A multiply-add counts once, and an element has two bytes.
    assert operations / 2 == pytest.approx(242, rel=1e-3)
    slow, fast = (host_r_part(each, "bfloat16", find_cpu_host("epyc-9654")) for each in (deepseek, kimi))
    # Arithmetic limits the speed, not memory.
    assert slow.seconds_per_token == pytest.approx(2 * fast.seconds_per_token)
    # Codes are multiplied as bfloat16, but fewer bytes are read.
    codes = host_r_part(deepseek, "int4", find_cpu_host("epyc-9654"))
    assert codes.seconds_per_token == slow.seconds_per_token
    assert codes.arithmetic_over_reads == pytest.approx(slow.arithmetic_over_reads * 576 * 2 / (25376 / 61))
    assert slow.arithmetic_over_reads == pytest.approx(11.1, abs=0.1)  # This host has no AMX.


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss", "llama-gqa"])
def test_windows_are_those_that_the_model_asks_its_attention_for(name: str) -> None:
    model = model_zoo.build_model(name)
    register_attention()
    model.set_attn_implementation(ATTENTION_NAME)
    layers = probe_layout(TransformersCode(model), model.config, "auto").layers
    windows = tuple(layer.window for layer in layers)
    assert read_shape(model.config.to_dict(), name).windows == (windows if any(windows) else ())


def test_windows_of_published_files() -> None:
    """Windows follow each family's file.

    Gemma-3's files name no pattern, and five layers of six slide. Qwen2's name a window that is not used. GPT-Neo's
    name every layer.
    """
    assert read_shape(CONFIG_MAPPING["gpt_neo"]().to_dict(), "m").windows == (0, 256) * 12
    gemma = {"text_config": LLAMA | {"model_type": "gemma3_text", "sliding_window": 1024}, "model_type": "gemma3"}
    assert read_shape(gemma, "m").windows == tuple(0 if layer % 6 == 5 else 1024 for layer in range(32))
    qwen = LLAMA | {"sliding_window": 4096, "max_window_layers": 30}
    assert read_shape(qwen | {"use_sliding_window": False}, "m").windows == ()
    assert read_shape(qwen | {"use_sliding_window": True}, "m").windows == (0,) * 30 + (4096,) * 2
    chunked = {"layer_types": ["chunked_attention", "full_attention"] * 16, "attention_chunk_size": 8192}
    assert read_shape(LLAMA | chunked, "m").windows == (8192, 0) * 16
    assert read_shape(LLAMA | chunked, "m").chunked and not read_shape(gemma, "m").chunked


def test_falcons_new_architecture_has_groups_of_queries() -> None:
    """Falcon-40B's file says ``multi_query`` but has 8 KV heads; Falcon-7B's file means what it says."""
    falcon = LLAMA | {"model_type": "falcon", "multi_query": True, "num_kv_heads": 8}
    assert read_shape(falcon | {"new_decoder_architecture": True}, "m").num_kv_heads == 8
    assert read_shape(falcon | {"new_decoder_architecture": False}, "m").num_kv_heads == 1


def test_names_of_other_families_are_read() -> None:
    """The published files of Falcon-11B, MPT-7B and BLOOM-560M name their width in their own ways."""
    wide = read_shape(LLAMA | {"model_type": "falcon", "ffn_hidden_size": 9, "intermediate_size": None}, "m")
    assert wide.intermediate_size == 9
    mpt = {"model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32, "vocab_size": 50432}
    assert f"{read_shape(mpt | {'expansion_ratio': 4}, 'm').parameters / 1e9:.1f}" == "6.6"
    bloom = {"model_type": "bloom", "n_embed": 1024, "n_layer": 24, "num_attention_heads": 16, "vocab_size": 250880}
    assert f"{read_shape(bloom, 'm').parameters / 1e6:.0f}" == "559"


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelLoadError, match=r"config\.json"):
            find_shape(str(tmp_path))
    with pytest.raises(ModelLoadError, match="no such model folder"):
        find_shape("no-such-model")


def test_shapes_are_checked_once() -> None:
    with pytest.raises(ConfigError, match="experts_per_token"):
        ModelShape("m", 1, 8, 8, 2, 1, 4, 10, num_experts=2, experts_per_token=3)
    with pytest.raises(ConfigError, match="dtype"):
        ModelShape("m", 1, 8, 8, 2, 1, 4, 10, dtype="float8")
