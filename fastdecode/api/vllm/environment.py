"""Notes which of vLLM's environment variables are set and have no effect."""

from __future__ import annotations

import os
import re

API_KEY, LOG_LEVEL = "VLLM_API_KEY", "VLLM_LOGGING_LEVEL"

TAKEN = {
    API_KEY: "as --api-key, after FASTDECODE_API_KEY",
    LOG_LEVEL: "as --log-level",
}

INSTEAD = {
    "VLLM_CPU_KVCACHE_SPACE": "give --kv-cache-memory",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "give --s-cores and --r-cores",
    "VLLM_CPU_OMP_THREADS_BIND": "give --s-cores and --r-cores",
    "VLLM_HOST_IP": "give --host, and --r-workers HOST:PORT",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "idle connections stay open for 75 s",
    "VLLM_LOGGING_CONFIG_PATH": "give --log-level",
    "VLLM_MAX_N_SEQUENCES": "n is at most 16,384",
    "VLLM_PORT": "give --port",
    "VLLM_USE_MODELSCOPE": "models come from Hugging Face, or from a folder",
}
"""vLLM's environment variables without effect, with the flag or behavior that replaces each."""


def said() -> str:
    """Return one sentence about vLLM's variables that are set and have no effect; "" if there are none."""
    names = sorted(
        name for name, value in os.environ.items() if name.startswith("VLLM_") and _is_a_setting(name, value)
    )
    told = [f"{name} ({INSTEAD[name]})" if name in INSTEAD else name for name in names]
    return f"environment variables of vLLM that mean nothing here are ignored: {', '.join(told)}" if told else ""


def _is_a_setting(name: str, value: str) -> bool:
    if not value or not name.startswith("VLLM_"):
        return False
    # Kubernetes sets variables of these forms in every container if a Service is called vllm
    of_kubernetes = re.compile(r"VLLM_(.*_)?(SERVICE_(HOST|PORT).*|PORT_\d+_.*)")
    return name not in TAKEN and not of_kubernetes.fullmatch(name) and "://" not in value
