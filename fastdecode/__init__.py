"""FastDecode: decode large language models with the attention on remote CPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "LLMEngine", "RequestOutput", "SamplingParams", "StructuredOutputsParams", "__version__"]

_HOMES = {
    "LLM": "fastdecode.llm",
    "LLMEngine": "fastdecode.engine",
    "RequestOutput": "fastdecode.api.outputs",
    "SamplingParams": "fastdecode.api.sampling_params",
    "StructuredOutputsParams": "fastdecode.api.structured_outputs",
}

if TYPE_CHECKING:
    from fastdecode.api.outputs import RequestOutput
    from fastdecode.api.sampling_params import SamplingParams
    from fastdecode.api.structured_outputs import StructuredOutputsParams
    from fastdecode.engine import LLMEngine
    from fastdecode.llm import LLM


def __getattr__(name: str) -> Any:
    """Import what users touch only when they touch it, so that an R-worker starts without torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'fastdecode' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
