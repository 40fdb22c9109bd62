"""Refuses models whose configuration shows that they cannot be split into S-part and R-part."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from fastdecode.core.errors import ConfigError, ModelLoadError, UnsupportedModelError
from fastdecode.sworker.files.rope import check_named
from fastdecode.sworker.files.rope import settings as rope_settings

OWN_ATTENTION = (
    "bloom", "codegen", "falcon", "gpt_neo", "gpt_neox_japanese", "gptj", "megatron-bert", "mpt", "openai-gpt",
    "rembert", "xglm",
)  # fmt: skip
"""Model types with their own attention code for which `own_attention.py` has an adapter."""

SUPPORTED = (
    "decoder-only causal language models whose attention goes through transformers' AttentionInterface, "
    f"and {', '.join(OWN_ATTENTION)}"
)

STATE = "this recurrence in the R-workers' kernels, and its rows handed to them (`sworker/adapters/states.py`)"
ADAPTER = "an adapter (`sworker/adapters/own_attention.py`)"
OTHER_MASK = "such a rule in the kernels"

NEEDS = {
    "hybrid_sliding": STATE,
    "compressed_sparse_attention": "rows that stand for several tokens in the cache",
    "heavily_compressed_attention": "rows that stand for several tokens in the cache",
}
"""The work that support of each unsupported kind of layer in configurations would take."""

STATE_TYPES = frozenset(("linear_attention", "conv", "hybrid", "mamba"))
"""Configuration names of layers with a state per sequence.

The modeling code tells whether such a state is supported.
"""


def has_state_types(hf_config: Any) -> bool:
    """Return whether the configuration lists layers that keep a state per sequence."""
    return not STATE_TYPES.isdisjoint(getattr(hf_config.get_text_config(), "layer_types", None) or ())


def refuse(hf_config: Any, what_it_does: str, needs: str = "", supported: str = SUPPORTED) -> NoReturn:
    """Raise UnsupportedModelError: what the model does, what support would take (``needs``), and what is supported."""
    taking = f" (it would take {needs})" if needs else ""
    error = UnsupportedModelError(
        f"{hf_config.model_type}: this model {what_it_does}, so its attention cannot be handed to R-workers{taking}; "
        f"supported are {supported}"
    )
    error.what_it_does = what_it_does
    raise error


def _refuse_all(hf_config: Any, what_it_does: str, needs: str = "") -> NoReturn:
    """Refuse a model for what its configuration says, whatever library's code would compute it."""
    refuse(hf_config, what_it_does, needs, "decoder-only causal language models")


def check_config(hf_config: Any) -> None:
    """Refuse models that FastDecode computes wrongly although the trial forward at loading would accept them."""
    text_config = hf_config.get_text_config()
    if getattr(hf_config, "is_encoder_decoder", False):
        _refuse_all(hf_config, "is an encoder-decoder model", "attention to an encoder's states")
    if getattr(text_config, "alibi", False) and hf_config.model_type not in OWN_ATTENTION:
        _refuse_all(hf_config, "adds a position bias to its scores (ALiBi)")
    if hf_config.model_type == "mpt":
        _check_mpt(hf_config)
    if getattr(text_config, "num_hidden_layers", 1) < 1:
        _refuse_all(hf_config, "has no layers")
    check_named(text_config)
    # Types of layers that pass this check; the trial forward may still refuse them
    attending = {"attention", "full_attention", "sliding_attention", "chunked_attention"}
    known = {*attending, "indexed_attention", "minimax_m3_sparse", "moe", "mlp"}
    unknown = set(getattr(text_config, "layer_types", None) or ()) - known - STATE_TYPES
    if unknown:
        needs = dict.fromkeys(NEEDS[each] for each in sorted(unknown) if each in NEEDS)
        _refuse_all(hf_config, f"has layers of type {', '.join(sorted(unknown))}", "; ".join(needs))


def _check_mpt(hf_config: Any) -> None:
    usual = {"alibi": True, "prefix_lm": False, "qk_ln": False, "attn_type": "multihead_attention"}
    for name, value in usual.items():
        found = getattr(hf_config.attn_config, name, value)
        if found != value:
            _refuse_all(hf_config, f"has {name} {found}, which transformers ignores")


def check_rope(hf_config: Any, max_model_len: int) -> None:
    """Refuse rotary embeddings whose frequencies depend on the longest sequence in the batch."""
    text_config = hf_config.get_text_config()
    for rope in rope_settings(text_config):
        kind = rope.get("rope_type", "default")
        own = getattr(text_config, "max_position_embeddings", 0)
        short = rope.get("original_max_position_embeddings") or own
        limit = {"longrope": short, "dynamic": own}.get(kind)
        same = kind == "longrope" and rope.get("short_factor") == rope.get("long_factor")
        if limit is not None and max_model_len > limit and not same:
            _refuse_all(
                hf_config,
                f"changes its {kind} rotary frequencies beyond {limit} tokens for a whole batch at once; "
                f"it runs with --max-model-len {limit} or less",
            )


@contextlib.contextmanager
def one_clear_error(model: str) -> Iterator[None]:
    """Within the context, turn any error into a ModelLoadError of one line that names the model."""
    try:
        yield
    except (ModelLoadError, UnsupportedModelError, ConfigError):
        raise
    except Exception as error:
        raise ModelLoadError(f"cannot load {model!r}: {_reason(model, error)}") from error


def _reason(model: str, error: Exception) -> str:
    folder = Path(model)
    if not folder.exists() and (folder.is_absolute() or model.startswith(".")):
        return "no such folder; give a folder with config.json and safetensors files, a GGUF file, or a model id"
    if folder.suffix == ".gguf":
        return f"it is no complete GGUF file: fetch it again ({one_line(error)})"
    if folder.is_file():
        return "this is a file; give the folder it is in"
    if folder.is_dir() and not (folder / "config.json").exists():
        return "the folder has no config.json"
    if isinstance(error, json.JSONDecodeError):
        return f"config.json is not valid JSON ({error})"
    if any(folder.glob("*.bin")) and not any(folder.glob("*.safetensors")):
        return (
            "the folder has its weights as .bin files, which can hold code; convert them to safetensors once, where "
            "you trust them: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        )
    return one_line(error)


def one_line(error: Exception) -> str:
    """Return the first line of an error, and the second one if the first only announces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[: 1 + lines[0].endswith(":")])
