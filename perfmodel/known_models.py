"""The shapes of models that plans know by name."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

from fastdecode.perfmodel.index_shape import IndexShape
from fastdecode.perfmodel.latent_shape import LatentShape
from fastdecode.perfmodel.model_shape import ModelShape
from fastdecode.perfmodel.state_shape import StateShape

_LLAMA_70B = ModelShape("llama-2-70b", 80, 8192, 28672, 64, 8, 128, 32000, dtype="float16")
_LLAMA_3_70B = replace(_LLAMA_70B, name="llama-3-70b", vocab_size=128256, dtype="bfloat16")
_MISTRAL_7B = ModelShape("mistral-7b", 32, 4096, 14336, 32, 8, 128, 32000)

_DEEPSEEK_V3 = ModelShape(
    "deepseek-v3", 61, 7168, 2048, 128, 1, 576, 129280, num_experts=256, experts_per_token=8,
    shared_intermediate_size=2048, latent=LatentShape(512, 1536, 128, 64, 128), dense_layers=3,
    dense_intermediate_size=18432,
)  # fmt: skip
"""transformers' DeepseekV3Config, and so of R1; weights in bfloat16 (published in FP8)."""

_LLAMA_4_SCOUT = ModelShape(
    "llama-4-scout", 48, 5120, 8192, 40, 8, 128, 202048, num_experts=16, shared_intermediate_size=8192,
    windows=(8192, 8192, 8192, 0) * 12, chunked=True,
)  # fmt: skip
"""transformers' Llama4TextConfig. Maverick is the same with experts in every other layer: NVIDIA/Megatron-LM,
examples/post_training/modelopt/conf/meta-llama/Llama-4-Maverick-17B-128E-Instruct.sh."""

MAX_CONTEXTS = {
    "llama-3-8b": 131072, "llama-3-70b": 131072, "llama-3.3-70b": 131072, "mistral-7b": 32768, "mixtral-8x7b": 32768,
    "mistral-small": 131072, "qwen3-32b": 131072, "qwen3-235b-a22b": 262144, "gpt-oss-120b": 131072,
    "deepseek-v3": 163840, "deepseek-v3.2": 163840, "kimi-k2": 262144, "glm-5": 202752, "minimax-m3": 1048576,
    "llama-4-scout": 10485760, "llama-4-maverick": 1048576, "qwen3-next-80b-a3b": 262144, "qwen3.5-397b-a17b": 262144,
    "granite-4-h-small": 131072, "kimi-linear-48b": 1048576,
}  # fmt: skip
"""Longest published contexts of models, with extended ones; llama-3 as 3.1. The papers' own models have none."""

BUILT_IN = {
    shape.name: replace(shape, max_context=MAX_CONTEXTS.get(shape.name, 0))
    for shape in (
        ModelShape("llama-7b", 32, 4096, 11008, 32, 32, 128, 32000, dtype="float16"),
        ModelShape("llama-13b", 40, 5120, 13824, 40, 40, 128, 32000, dtype="float16"),
        ModelShape("llama-65b", 80, 8192, 22016, 64, 64, 128, 32000, dtype="float16"),
        _LLAMA_70B,
        ModelShape("llama-3-8b", 32, 4096, 14336, 32, 8, 128, 128256),
        _LLAMA_3_70B,
        replace(_LLAMA_3_70B, name="llama-3.3-70b"),
        _MISTRAL_7B,
        replace(_MISTRAL_7B, name="mixtral-8x7b", num_experts=8, experts_per_token=2),
        ModelShape("mistral-small", 40, 5120, 32768, 32, 8, 128, 131072),  # 3.x, 24B: sizes from Mistral3Config
        ModelShape("yi-34b", 60, 7168, 20480, 56, 8, 128, 64000),
        ModelShape("falcon-7b", 32, 4544, 18176, 71, 1, 64, 65024, 2, True),
        ModelShape("falcon-40b", 60, 8192, 32768, 128, 8, 64, 65024, 2, True),
        ModelShape("falcon-180b", 80, 14848, 59392, 232, 8, 64, 65024, 2, True),
        ModelShape("opt-6.7b", 32, 4096, 16384, 32, 32, 128, 50272, 2, True, dtype="float16"),
        ModelShape("opt-175b", 96, 12288, 49152, 96, 96, 128, 50272, 2, True, dtype="float16"),
        ModelShape("qwen3-32b", 64, 5120, 25600, 64, 8, 128, 151936),  # sizes from radixark/miles, qwen3-32B.sh
        # sizes from THUDM/slime, scripts/models/qwen3-235B-A22B.sh
        ModelShape("qwen3-235b-a22b", 94, 4096, 1536, 64, 4, 128, 151936, num_experts=128, experts_per_token=8),
        _LLAMA_4_SCOUT,
        replace(
            _LLAMA_4_SCOUT, name="llama-4-maverick", num_experts=128, dense_layers=24, dense_intermediate_size=16384
        ),
        # sizes from transformers' GptOssConfig; weights are taken as bfloat16, though they are published in MXFP4
        ModelShape(
            "gpt-oss-120b", 36, 2880, 2880, 64, 8, 64, 201088, num_experts=128, experts_per_token=4,
            windows=(128, 0) * 18
        ),
        _DEEPSEEK_V3,
        # sizes from transformers' DeepseekV32Config
        replace(
            _DEEPSEEK_V3, name="deepseek-v3.2", windows=(2048,) * 61, index=IndexShape(61, 64, 128, 2048,
            1536)
        ),
        # sizes from vllm-project/vime, scripts/models/kimi-k2.sh
        replace(_DEEPSEEK_V3, name="kimi-k2", num_heads=64, vocab_size=163840, num_experts=384, dense_layers=1),
        # sizes from transformers' GlmMoeDsaConfig, as in the technical report; every layer has its own index
        ModelShape(
            "glm-5", 78, 6144, 2048, 64, 1, 576, 154880, num_experts=256, experts_per_token=8,
            shared_intermediate_size=2048, latent=LatentShape(512, 2048, 192, 64, 256), dense_layers=3,
            dense_intermediate_size=12288, windows=(2048,) * 78, index=IndexShape(78, 32, 128, 2048, 2048),
        ),
        # sizes from transformers' MiniMaxM3VLTextConfig. The first three layers are dense and attend to all tokens: the
        # published sparse_attention_freq and moe_layer_freq begin with three zeros.
        ModelShape(
            "minimax-m3", 60, 6144, 3072, 64, 4, 128, 200064, num_experts=128, experts_per_token=4,
            shared_intermediate_size=3072, dense_layers=3, dense_intermediate_size=12288, windows=(0,) * 3 +
            (2048,) * 57, index=IndexShape(57, 4, 128, 2048, weighs_heads=False),
        ),
        # sizes from transformers' Qwen3NextConfig
        ModelShape(
            "qwen3-next-80b-a3b", 48, 2048, 512, 16, 2, 256, 151936, num_experts=512, experts_per_token=10,
            shared_intermediate_size=512, state=StateShape(36, 32, 128, 16, 128), gated_attention=True,
        ),
        # sizes from THUDM/slime, scripts/models/qwen3.5-397B-A17B.sh; sizes of states (linear_num_value_heads and more)
        # from published quotations of the config.json of Qwen/Qwen3.5-397B-A17B. They give 31 KB of cache per token and
        # 189 MB of states per sequence, like the model's announcement.
        ModelShape(
            "qwen3.5-397b-a17b", 60, 4096, 1024, 32, 2, 256, 248320, num_experts=512, experts_per_token=10,
            shared_intermediate_size=1024, state=StateShape(45, 64, 128, 16, 128), gated_attention=True,
        ),
        # sizes from transformers' NemotronHConfig, and the published pattern: 24 Mamba-2, 4 attention, 24 MLP layers
        ModelShape(
            "nemotron-h-8b", 28, 4096, 21504, 32, 8, 128, 131072, 2, state=StateShape(24, 128, 64, 8, 128,
            rates=1), mlp_layers=24,
        ),
        # sizes quoted from ibm-granite/granite-4.0-h-small's config.json; heads of states from GraniteMoeHybridConfig
        ModelShape(
            "granite-4-h-small", 40, 4096, 768, 32, 8, 128, 100352, tied_embeddings=True, num_experts=72,
            experts_per_token=10, shared_intermediate_size=1536, state=StateShape(36, 128, 64, 1, 128,
            rates=1),
        ),
        # sizes from transformers' KimiLinearConfig
        ModelShape(
            "kimi-linear-48b", 27, 2304, 1024, 32, 1, 576, 163840, num_experts=256, experts_per_token=8,
            shared_intermediate_size=1024, latent=LatentShape(512, 0, 128, 64, 128), dense_layers=1,
            dense_intermediate_size=9216, state=StateShape(20, 32, 128, 32, 128, decays=128, gates=0,
            rates=1, gate_rank=128),
        ),
    )
}  # fmt: skip
"""The models of the papers, and common sizes."""

HUB_NAMES = {
    "huggyllama/llama-7b": "llama-7b",
    "huggyllama/llama-13b": "llama-13b",
    "meta-llama/llama-2-7b": "llama-7b",
    "meta-llama/llama-2-13b": "llama-13b",
    "meta-llama/llama-2-70b": "llama-2-70b",
    "meta-llama/llama-3.1-8b": "llama-3-8b",
    "meta-llama/meta-llama-3.1-8b": "llama-3-8b",
    "meta-llama/llama-3.1-70b": "llama-3-70b",
    "meta-llama/llama-3.3-70b": "llama-3.3-70b",
    "meta-llama/llama-4-scout-17b-16e": "llama-4-scout",
    "meta-llama/llama-4-maverick-17b-128e": "llama-4-maverick",
    "mistralai/mistral-7b": "mistral-7b",
    "mistralai/mixtral-8x7b": "mixtral-8x7b",
    "mistralai/mistral-small-3.1-24b": "mistral-small",
    "mistralai/mistral-small-3.2-24b": "mistral-small",
    "01-ai/yi-34b": "yi-34b",
    "tiiuae/falcon-7b": "falcon-7b",
    "tiiuae/falcon-40b": "falcon-40b",
    "tiiuae/falcon-180b": "falcon-180b",
    "facebook/opt-6.7b": "opt-6.7b",
    "qwen/qwen3-32b": "qwen3-32b",
    "qwen/qwen3-235b-a22b": "qwen3-235b-a22b",
    "qwen/qwen3-next-80b-a3b": "qwen3-next-80b-a3b",
    "qwen/qwen3.5-397b-a17b": "qwen3.5-397b-a17b",
    "openai/gpt-oss-120b": "gpt-oss-120b",
    "deepseek-ai/deepseek-v3": "deepseek-v3",
    "deepseek-ai/deepseek-r1": "deepseek-v3",
    "deepseek-ai/deepseek-v3.1": "deepseek-v3",
    "deepseek-ai/deepseek-v3.2": "deepseek-v3.2",
    "deepseek-ai/deepseek-v3.2-exp": "deepseek-v3.2",
    "moonshotai/kimi-k2": "kimi-k2",
    "moonshotai/kimi-linear-48b-a3b": "kimi-linear-48b",
    "zai-org/glm-5": "glm-5",
    "minimaxai/minimax-m3": "minimax-m3",
    "nvidia/nemotron-h-8b": "nemotron-h-8b",
    "ibm-granite/granite-4.0-h-small": "granite-4-h-small",
}
"""Built-in names by hub id; ids are without the parts that name the tuning and its date."""


def known_name(hub_id: str) -> str | None:
    """Return the built-in name of the model that ``hub_id`` means; None if the model is not built in."""
    plain = hub_id.lower()
    tuned = re.compile(
        r"-(instruct|chat|base|hf|it|thinking|reasoning|v0\.\d|\d{4}|fp8|original|bf16|8k|128k)(?=-|$)", re.IGNORECASE
    )
    while (shorter := tuned.sub("", plain)) != plain:
        plain = shorter
    return HUB_NAMES.get(hub_id.lower()) or HUB_NAMES.get(plain)


def cached_config(hub_id: str) -> Path | None:
    """Return the path of ``config.json`` for ``hub_id`` in the hub's local cache; None if it is not there."""
    home = (
        os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser() / "hub"
    )
    folder = Path(home) / f"models--{hub_id.replace('/', '--')}" / "snapshots"
    found = sorted(folder.glob("*/config.json"), key=lambda path: path.stat().st_mtime) if folder.is_dir() else []
    return found[-1] if found else None
