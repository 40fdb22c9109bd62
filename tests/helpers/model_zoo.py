"""Tiny random models of every supported architecture, and the tokens that transformers generates with them.

The exactness tests compare FastDecode with these references, so the references must be able to fail. Models with
transformers' default initial weights repeat one token forever, and then any attention passes. Hence weights have a
standard deviation of 0.1 to 0.2, and embeddings are untied. Features have an effect: windows are shorter than the text,
a soft cap is within the scores' range, sinks are as large as scores. `zoo_search.py` chooses the prompts;
`test_references.py` checks the result.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from helpers.examples import SEES_ALL

NEW_TOKENS = 64
PROMPT_LENGTHS = (200, 1, 40, 128, 3, 77, 17, 160)
VOCABULARY = 512
POSITIONS = 512  # length of the longest text that a model accepts
WEIGHT_SEED = 1
SINK_STD = 3.0
REFERENCES = "FASTDECODE_TEST_REFERENCES"
RECORDED = Path(__file__).parents[1] / "references.json"
"""Recorded tokens by versions; `python tests/helpers/record_references.py` adds those of the installed versions.

The tokens are the same on every processor: no two best logits are closer than rounding. test_references.py checks each
token with the models of this machine.
"""


@dataclass(frozen=True)
class Recipe:
    """How to make one model, and its prompts."""

    config: str  # name of the configuration's class in transformers
    std: float  # standard deviation of every weight and bias: around one for norms, around zero for the rest
    prompt_seed: int  # the only value that zoo_search.py chooses
    settings: dict[str, Any]
    attention: str = "eager"  # transformers' attention implementation
    longest_prompt: int = max(PROMPT_LENGTHS)
    distinct_tokens: int = 16  # least number of different tokens in each output


def llama_like(**more: Any) -> dict[str, Any]:
    """Return settings that most architectures name alike: two key-value heads for four query heads."""
    return {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": POSITIONS,
    } | more


RECIPES = {
    # Three layers in four have chunks of 32 tokens; the fourth scales queries, more after every 16 tokens.
    "llama4_text": Recipe(
        "Llama4TextConfig",
        0.15,
        2,
        llama_like(hidden_size=128, num_hidden_layers=4, head_dim=32, intermediate_size_mlp=128, num_local_experts=4)
        | {"interleave_moe_layer_step": 2, "attention_chunk_size": 32, "floor_scale": 16, "attn_scale": 0.5},
    ),
    "llama-mha": Recipe("LlamaConfig", 0.15, 7, llama_like(num_key_value_heads=4)),
    "llama-gqa": Recipe("LlamaConfig", 0.15, 8, llama_like(hidden_size=128, num_attention_heads=8)),
    "mistral": Recipe("MistralConfig", 0.15, 3, llama_like(hidden_size=128, num_hidden_layers=6, sliding_window=60)),
    "qwen2": Recipe("Qwen2Config", 0.15, 6, llama_like()),
    "qwen3": Recipe("Qwen3Config", 0.15, 8, llama_like(head_dim=32)),
    "opt": Recipe(
        "OPTConfig",
        0.2,
        1,
        {"hidden_size": 128, "word_embed_proj_dim": 128, "ffn_dim": 128, "num_hidden_layers": 3}
        | {"num_attention_heads": 4, "max_position_embeddings": POSITIONS},
    ),
    "gpt_bigcode": Recipe(
        "GPTBigCodeConfig", 0.2, 1, {"n_embd": 128, "n_inner": 128, "n_layer": 3, "n_head": 4, "n_positions": POSITIONS}
    ),
    "gpt_neox": Recipe("GPTNeoXConfig", 0.2, 1, llama_like(hidden_size=128)),
    "phi3": Recipe("Phi3Config", 0.15, 1, llama_like(original_max_position_embeddings=POSITIONS)),
    "gemma2": Recipe(
        "Gemma2Config",
        0.15,
        1,
        llama_like(num_hidden_layers=4, head_dim=16, sliding_window=32)
        | {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 20},
    ),
    "mixtral": Recipe("MixtralConfig", 0.15, 6, llama_like(num_local_experts=4, num_experts_per_tok=2)),
    "qwen3_moe": Recipe(
        "Qwen3MoeConfig",
        0.15,
        2,
        llama_like(hidden_size=128, head_dim=32, num_experts=4, num_experts_per_tok=2)
        | {"moe_intermediate_size": 64, "norm_topk_prob": True},
    ),
    "gpt_oss": Recipe(
        "GptOssConfig",
        0.15,
        4,
        llama_like(num_hidden_layers=4, head_dim=32, sliding_window=32, num_local_experts=4, num_experts_per_tok=2),
    ),
}


def falcon_like(**more: Any) -> dict[str, Any]:
    """Return small settings of Falcon-7B: one key-value head, rotary embeddings."""
    own = {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6, "max_position_embeddings": POSITIONS}
    return own | more


RECIPES |= {
    "falcon": Recipe("FalconConfig", 0.2, 4, falcon_like()),
    "falcon-40b": Recipe(
        "FalconConfig",
        0.2,
        3,
        falcon_like(hidden_size=128, num_attention_heads=8, num_kv_heads=2, new_decoder_architecture=True),
    ),
    # transformers' eager attention adds ALiBi twice here, and rounds positions above 256 in bfloat16
    "falcon-rw": Recipe(
        "FalconConfig",
        0.12,
        3,
        falcon_like(hidden_size=192, alibi=True, multi_query=False, parallel_attn=False, bias=True),
        "sdpa",
        256 - NEW_TOKENS,
        10,
    ),
    "bloom": Recipe("BloomConfig", 0.2, 6, {"hidden_size": 192, "n_layer": 3, "n_head": 12}),
    "mpt": Recipe(
        "MptConfig",
        0.3,
        3,
        {"d_model": 96, "n_layers": 3, "n_heads": 6, "max_seq_len": POSITIONS}
        | {"attn_config": {"clip_qkv": 2.0, "softmax_scale": 0.3}},
    ),
    "gptj": Recipe(
        "GPTJConfig", 0.2, 3, {"n_embd": 128, "n_layer": 3, "n_head": 4, "rotary_dim": 16, "n_positions": POSITIONS}
    ),
}

ARCHITECTURES = tuple(RECIPES)
SPARSE = ("mixtral", "qwen3_moe", "gpt_oss")  # experts are called only with the tokens that chose them
ROUTED = (*SPARSE, "llama4_text")  # models with a router, also if each expert is called with all tokens


@dataclass(frozen=True)
class Reference:
    """The tokens that transformers generates greedily, one prompt at a time."""

    tokens: list[list[int]]  # NEW_TOKENS for each prompt
    min_gap: float  # smallest difference between the best and the second-best logit of any step


def build_model(name: str, **changes: Any) -> Any:
    """Return the model in float32 on the CPU, with transformers' own attention; ``changes`` overrides settings."""
    recipe = RECIPES[name]
    fixed = {
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    config = getattr(transformers, recipe.config)(**fixed | recipe.settings | changes)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=recipe.attention, dtype=torch.float32
    )
    return randomised(model, recipe.std)


@torch.no_grad()
def randomised(model: Any, std: float, bias_std: float | None = None) -> Any:
    """Return the model with reproducible random weights of standard deviation ``std``, and biases of ``bias_std``."""
    for key, parameter in model.named_parameters():
        # Norms start at one, or at zero if the model adds one; biases and sinks start at or near zero.
        centre = parameter.round() if parameter.ndim == 1 else torch.zeros_like(parameter)
        # Sinks matter only if they are as large as scores.
        own = {"sinks": SINK_STD, "bias": std if bias_std is None else bias_std}
        own_std = own.get(key.rpartition(".")[2], std)
        # Each parameter has its own generator, so that the order of modules does not matter.
        generator = torch.Generator().manual_seed(WEIGHT_SEED ^ zlib.crc32(key.encode()))
        parameter.copy_(centre + own_std * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def save_model(name: str, folder: Path) -> Path:
    """Save the model, without tokenizer, in a folder that from_pretrained and FastDecode load; return the folder."""
    build_model(name).save_pretrained(folder)
    return folder


def prompts(name: str) -> list[list[int]]:
    """Return eight prompts of random tokens, with the lengths of ``prompt_lengths``."""
    generator = torch.Generator().manual_seed(RECIPES[name].prompt_seed)
    return [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in prompt_lengths(name)]


def prompt_lengths(name: str) -> list[int]:
    """Return PROMPT_LENGTHS, without lengths that exceed the model's references."""
    return [min(length, RECIPES[name].longest_prompt) for length in PROMPT_LENGTHS]


def with_other_start(prompt: list[int]) -> list[int]:
    """Return the prompt with another first token; the reference must change with it."""
    return [(prompt[0] + 1) % VOCABULARY, *prompt[1:]]


def load_model(name: str, dtype: torch.dtype) -> Any:
    """Return the model in ``dtype``. It is saved and loaded, since a cast would also round rotary frequencies."""
    model = build_model(name)
    if dtype is torch.float32:
        return model
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=RECIPES[name].attention
        )
    return loaded.eval()


def recorded(name: str) -> Reference | None:
    """Return the recorded reference for these versions and this recipe; None if there is none."""
    found = json.loads(RECORDED.read_text())["references"].get(versions(), {}).get(name)
    return Reference(found["tokens"], found["min_gap"]) if found and found["recipe"] == recipe_digest(name) else None


def versions() -> str:
    """Return the versions that decide what a model generates: torch without its build, and transformers."""
    return f"torch {torch.__version__.partition('+')[0]}, transformers {transformers.__version__}"


def recipe_digest(name: str) -> str:
    """Return a hash of everything that the model's weights and prompts depend on."""
    parts = RECIPES[name], PROMPT_LENGTHS, NEW_TOKENS, VOCABULARY, POSITIONS, WEIGHT_SEED, SINK_STD
    return f"{zlib.crc32(repr(parts).encode()):08x}"


@functools.cache
def reference(name: str) -> Reference:
    """Return NEW_TOKENS by transformers for each of the model's prompts: recorded, or generated once.
    All processes of a test run share generated ones in the folder that REFERENCES names (conftest.py).
    """
    if found := None if SEES_ALL else recorded(name):
        return found
    place = Path(os.environ[REFERENCES], f"{name}.json") if REFERENCES in os.environ else None
    if place and place.exists():
        return Reference(**json.loads(place.read_text()))
    found = generate(build_model(name), prompts(name))
    if place:
        written = place.with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps(vars(found)))
        written.replace(place)
    return found


def generate(model: Any, prompts: list[list[int]]) -> Reference:
    """Generate greedily, one prompt at a time."""
    tokens, min_gap = [], float("inf")
    for prompt in prompts:
        result = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens.append(result.sequences[0, len(prompt) :].tolist())
        best = torch.cat(result.logits).float().topk(2).values
        min_gap = min(min_gap, (best[:, 0] - best[:, 1]).min().item())
    return Reference(tokens, min_gap)


@torch.no_grad()
def reference_logits(model: Any, prompt: list[int], outputs: list[int]) -> torch.Tensor:
    """Return the model's logits at each of ``outputs``: float32 [len(outputs), vocabulary].

    Teacher-forced: one forward over the prompt and the outputs before each.
    """
    ids = torch.tensor([prompt + outputs[:-1]])
    return model(ids, use_cache=False, logits_to_keep=len(outputs)).logits[0].float()


def disagreements(model: Any, prompt: list[int], outputs: list[int]) -> int:
    """Return at how many steps the model, given prompt and outputs, prefers another token.

    Zero if and only if greedy decoding generates outputs.
    """
    return int((reference_logits(model, prompt, outputs).argmax(-1) != torch.tensor(outputs)).sum())
