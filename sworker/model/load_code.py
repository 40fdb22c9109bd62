"""The choice of the library whose model code is the S-part (``--model-impl``)."""

from __future__ import annotations

from typing import Any

from fastdecode.api.config import EngineConfig
from fastdecode.sworker.model import transformers_code
from fastdecode.sworker.model.code import LoadedCode
from fastdecode.sworker.model.sharding import Rank


def load_code(config: EngineConfig, hf_config: Any, rank: Rank | None) -> LoadedCode:
    """Load the model that ``config`` names, or its part for ``rank``, with the library that ``config`` names."""
    if config.model_impl != "vllm":
        return transformers_code.load(config, hf_config, rank)
    from fastdecode.sworker.model import vllm_code  # vLLM takes seconds to import

    return vllm_code.load(config, hf_config)
