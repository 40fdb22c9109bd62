"""The choice of the library whose model code is the S-part (``--model-impl``)."""

from __future__ import annotations

from typing import Any

from fastdecode.api.config import EngineConfig
from fastdecode.core.optional import optional
from fastdecode.sworker.model import transformers_code
from fastdecode.sworker.model.code import AnyRank, LoadedCode


def load_code(config: EngineConfig, hf_config: Any, rank: AnyRank | None) -> LoadedCode:
    """Load the model that ``config`` names, or its part for ``rank``, with the library that ``config`` names."""
    if config.model_impl != "vllm":
        return transformers_code.load(config, hf_config, rank)
    return optional("vLLM's code").load(config, hf_config)
