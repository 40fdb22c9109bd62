"""The requests of a benchmark: prompts, output lengths and arrival times."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fastdecode.api.settings import check_settings, setting
from fastdecode.core.errors import ConfigError

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class WorkItem:
    """One request: token ids, tokens to generate, arrival in seconds from the start, and the source text, if any."""

    prompt_token_ids: list[int]
    output_len: int
    arrival_seconds: float = 0.0
    prompt: str | None = None


LENGTHS = ("random_input_len", "random_output_len", "random_range_ratio", "random_prefix_len")
ARRIVALS = ("num_prompts", "request_rate", "burstiness")
"""Fields of a WorkloadSpec that are flags of ``bench throughput`` and ``simulate``."""

RAMPS = ("linear", "exponential")


@dataclass(frozen=True)
class WorkloadSpec:
    """The dataset flags of ``bench throughput``, with vLLM's meaning."""

    dataset_name: str = "random"
    dataset_path: str | None = None
    random_input_len: int = setting(1024, "length of random prompts", metavar="TOKENS", least=1, also=("input_len",))
    random_output_len: int = setting(128, "length of random outputs", metavar="TOKENS", least=1, also=("output_len",))
    random_range_ratio: float = setting(0.0, "random lengths vary by ± this part", metavar="R")
    random_prefix_len: int = setting(0, "tokens at the start that all random prompts share", metavar="TOKENS")
    num_prompts: int = setting(64, "number of requests", metavar="N", least=1)
    request_rate: float = setting(math.inf, "requests that arrive per second", metavar="RATE", unset="inf: all at once")
    burstiness: float = setting(
        1.0, "shape of the gamma distribution of the gaps between arrivals: 1 is Poisson's, less makes bursts, more "
        "evens them", metavar="SHAPE",
    )  # fmt: skip
    seed: int = 0

    def __post_init__(self) -> None:
        check_settings(self)
        if not 0 <= self.random_range_ratio < 1:
            raise ConfigError(f"random_range_ratio must be in [0, 1), not {self.random_range_ratio}")
        if self.random_prefix_len < 0:
            raise ConfigError(f"random_prefix_len must be 0 or more, not {self.random_prefix_len}")
        if not self.request_rate > 0:
            raise ConfigError(f"request_rate must be above 0 requests per second, not {self.request_rate}")
        if not 0 < self.burstiness < math.inf:
            raise ConfigError(f"burstiness must be above 0 and finite, not {self.burstiness}")
        if self.dataset_name != "random" and not self.dataset_path:
            raise ConfigError(f"dataset {self.dataset_name!r} needs --dataset-path")
        if self.dataset_name == "random" and self.dataset_path:
            raise ConfigError("dataset_path: dataset 'random' reads no file; give its --dataset-name as well")


@dataclass(frozen=True)
class RampUp:
    """Accelerating arrivals, with "linear" or "exponential" growth.

    The rate grows from ``start_rps`` per second at the first request to ``end_rps`` at the last.
    """

    strategy: str
    start_rps: float
    end_rps: float

    def __post_init__(self) -> None:
        if self.strategy not in RAMPS:
            raise ConfigError(f"ramp_up_strategy must be one of {', '.join(RAMPS)}, not {self.strategy!r}")
        if not 0 < self.start_rps <= self.end_rps < math.inf:
            raise ConfigError(
                "ramp_up_start_rps must be above 0 and at most ramp_up_end_rps, which must be finite, not "
                f"{self.start_rps} and {self.end_rps}"
            )

    def arrivals(self, count: int, burstiness: float, seed: int) -> np.ndarray:
        """Return the arrival of each request in seconds: float64 [count]. ``burstiness``: as in ``WorkloadSpec``."""
        progress = np.arange(count) / max(count - 1, 1)
        growth = self.end_rps - self.start_rps
        rates = self.start_rps + growth * progress
        if self.strategy == "exponential":
            rates = self.start_rps * (self.end_rps / self.start_rps) ** progress
        return np.cumsum(np.random.default_rng(seed).gamma(burstiness, 1 / (rates * burstiness)))


def make_workload(spec: WorkloadSpec, vocab_size: int, max_model_len: int, encode: Encode | None) -> list[WorkItem]:
    """Return the requests that ``spec`` describes. Raise ConfigError if its data do not fit the model."""
    rng = np.random.default_rng(spec.seed)
    if spec.dataset_name == "random":
        items = _random_items(spec, rng, vocab_size)
    else:
        items = _file_items(spec, max_model_len, encode)
    longest = max(len(item.prompt_token_ids) + item.output_len for item in items)
    if longest > max_model_len:
        raise ConfigError(f"prompt + output reach {longest} tokens, and max_model_len is {max_model_len}")
    times = np.cumsum(_gaps(spec, rng, len(items)))
    return [replace(item, arrival_seconds=float(time)) for item, time in zip(items, times, strict=True)]


def _gaps(spec: WorkloadSpec, rng: np.random.Generator, count: int) -> np.ndarray:
    """Return the seconds before each arrival, with mean 1 / ``request_rate``: float64 [count]."""
    if math.isinf(spec.request_rate):
        return np.zeros(count)
    return rng.gamma(spec.burstiness, 1 / (spec.request_rate * spec.burstiness), count)


def _random_items(spec: WorkloadSpec, rng: np.random.Generator, vocab_size: int) -> list[WorkItem]:
    """Return random requests.

    Token ids are uniform, and so are lengths within ±``random_range_ratio`` of the nominal ones.
    """
    prefix = rng.integers(0, vocab_size, spec.random_prefix_len).tolist()

    def length(nominal: int) -> int:
        low, high = (math.floor(nominal * (1 + sign * spec.random_range_ratio)) for sign in (-1, 1))
        return max(1, int(rng.integers(low, high + 1)))

    return [
        WorkItem(
            prefix + rng.integers(0, vocab_size, length(spec.random_input_len)).tolist(), length(spec.random_output_len)
        )
        for _ in range(spec.num_prompts)
    ]


def _file_items(spec: WorkloadSpec, max_model_len: int, encode: Encode | None) -> list[WorkItem]:
    """Return requests of ShareGPT's JSON, or of JSONL with "prompt" and optional "output_tokens".

    Of each ShareGPT conversation, only the first turn and its answer are used.
    """
    if encode is None:
        raise ConfigError(f"dataset {spec.dataset_name!r} holds text, but the tokenizer was not loaded")
    records = _read_records(spec)
    items: list[WorkItem] = []
    for record in records:
        text, output_len = (_sharegpt_pair if spec.dataset_name == "sharegpt" else _custom_pair)(record, spec, encode)
        token_ids = encode(text) if text and output_len > 0 else []
        if token_ids and len(token_ids) + output_len <= max_model_len:
            items.append(WorkItem(token_ids, output_len, prompt=text))
        if len(items) == spec.num_prompts:
            return items
    if not items:
        raise ConfigError(f"{spec.dataset_path}: no conversation fits max_model_len {max_model_len}")
    return items


def _read_records(spec: WorkloadSpec) -> list[Any]:
    path = Path(str(spec.dataset_path))
    try:
        text = path.read_text(encoding="utf-8")
        records = (
            json.loads(text)
            if spec.dataset_name == "sharegpt"
            else [json.loads(line) for line in text.splitlines() if line]
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read dataset {path}: {error}") from error
    if not isinstance(records, list):
        raise ConfigError(f"{path}: a ShareGPT file is a JSON list of conversations")
    return records


def _sharegpt_pair(record: Any, spec: WorkloadSpec, encode: Encode) -> tuple[str, int]:
    turns = record.get("conversations", []) if isinstance(record, dict) else []
    texts: list[Any] = (
        [turn.get("value") if isinstance(turn, dict) else None for turn in turns] if isinstance(turns, list) else [None]
    )
    if not all(isinstance(text, str) for text in texts[:2]):
        raise ConfigError(f'{spec.dataset_path}: a conversation is a list of turns, each with a text "value"')
    return (texts[0], len(encode(texts[1]))) if len(texts) > 1 else ("", 0)


def _custom_pair(record: Any, spec: WorkloadSpec, encode: Encode) -> tuple[str, int]:
    if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
        raise ConfigError(f'{spec.dataset_path}: every line must be an object with a text "prompt"')
    output_len = record.get("output_tokens", spec.random_output_len)
    if not isinstance(output_len, int):
        raise ConfigError(f"{spec.dataset_path}: output_tokens must be a whole number, not {output_len!r}")
    return record["prompt"], output_len
