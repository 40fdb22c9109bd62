"""Ids of models on the hub, and the names by which their sizes are known here."""

from __future__ import annotations

import os
import re
from pathlib import Path

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
"""Ids without what says how a model was tuned, and when."""

_TUNED = re.compile(
    r"-(instruct|chat|base|hf|it|thinking|reasoning|v0\.\d|\d{4}|fp8|original|bf16|8k|128k)(?=-|$)", re.IGNORECASE
)


def known_name(hub_id: str) -> str | None:
    """Return the name by which a hub's id is known here; None where it is not."""
    plain = hub_id.lower()
    while (shorter := _TUNED.sub("", plain)) != plain:
        plain = shorter
    return HUB_NAMES.get(hub_id.lower()) or HUB_NAMES.get(plain)


def cached_config(hub_id: str) -> Path | None:
    """Return the configuration that the hub's cache on this machine has of an id; None where it has none."""
    home = (
        os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser() / "hub"
    )
    folder = Path(home) / f"models--{hub_id.replace('/', '--')}" / "snapshots"
    found = sorted(folder.glob("*/config.json"), key=lambda path: path.stat().st_mtime) if folder.is_dir() else []
    return found[-1] if found else None
