"""FastDecode: decode large language models with the attention on remote CPUs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "LLM", "CompletionOutput", "EngineArgs", "LLMEngine", "PromptType", "RequestOutput", "SamplingParams",
    "StructuredOutputsParams", "TextPrompt", "TokensPrompt", "__version__",
]  # fmt: skip

# Beside an R-worker in this process, waiting threads of GNU OpenMP, which torch uses, must not spin through attention:
# they would take its cores. 10,000 turns, some 0.1 ms, reach from one operation to the next. OpenMP reads this as torch
# is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

if TYPE_CHECKING:
    from fastdecode.api.from_vllm import EngineArgs
    from fastdecode.api.outputs import CompletionOutput, RequestOutput
    from fastdecode.api.sampling_params import SamplingParams
    from fastdecode.api.structured_outputs import StructuredOutputsParams
    from fastdecode.api.text import PromptType, TextPrompt, TokensPrompt
    from fastdecode.engine.engine import LLMEngine
    from fastdecode.llm import LLM


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that an R-worker starts without torch."""
    homes = {
        "LLM": "fastdecode.llm",
        "CompletionOutput": "fastdecode.api.outputs",
        "EngineArgs": "fastdecode.api.from_vllm",
        "PromptType": "fastdecode.api.text",
        "TextPrompt": "fastdecode.api.text",
        "TokensPrompt": "fastdecode.api.text",
        "LLMEngine": "fastdecode.engine.engine",
        "RequestOutput": "fastdecode.api.outputs",
        "SamplingParams": "fastdecode.api.sampling_params",
        "StructuredOutputsParams": "fastdecode.api.structured_outputs",
    }
    if name not in homes:
        if not name.startswith("_"):
            from fastdecode.api.from_vllm import NAMES

            if name in NAMES:
                raise ImportError(f"there is no fastdecode.{name}: {NAMES[name]}")
        raise AttributeError(f"module 'fastdecode' has no attribute {name!r}")
    from importlib import import_module

    try:
        return getattr(import_module(homes[name]), name)
    except ImportError as error:
        if why := not_installed():
            raise ImportError(f"fastdecode.{name}: {why}") from error
        raise


def not_installed() -> str:
    """Return advice for a user who imports the source folder without having built its C++ part; "" if it is built."""
    from importlib.util import find_spec
    from pathlib import Path

    if find_spec("fastdecode._rworker"):
        return ""
    folder = Path(__file__).resolve().parents[1]
    return (
        f"Python reads the source folder {folder}, whose C++ part is not built there. Run `make` there and use its "
        f"{folder / '.venv/bin/python'}, or `pip install {folder}` and start Python in another folder (or with -P)"
    )
