"""Llamas of given shapes with random weights, and engines that run them over a stand-in R-worker."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from stand_in import StandInBackend

from fastdecode.api.config import EngineConfig
from fastdecode.engine.engine import LLMEngine
from fastdecode.perfmodel.lab.measure.dataset import WorkItem
from fastdecode.perfmodel.lab.measure.throughput import run_throughput
from fastdecode.perfmodel.lab.measure.throughput_report import ThroughputRun


def llama_folder(
    hidden: int,
    num_layers: int,
    vocab: int = 4096,
    group: int = 4,
    intermediate: int | None = None,
    initializer_range: float = 0.02,
    heads: int | None = None,
) -> str:
    """Return a folder with only a config.json: Llama's proportions for the width ``hidden``, and heads of 64 dims.
    ``group``: query heads per KV head. ``heads``: more heads than ``hidden`` / 64 make attention expensive compared
    with the rest. ``initializer_range``: of the random weights; with 0.2, greedy tokens depend on all tokens before
    them.
    """
    heads = heads or hidden // 64
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate or hidden * 11 // 4,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // group,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "initializer_range": initializer_range,
        "dtype": "float32",
    }
    folder = Path(tempfile.mkdtemp(prefix="fastdecode-bench-"))
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def stand_in_engine(folder: str, rows: int, num_mini_batches: int, threads: int, dtype: str) -> LLMEngine:
    """Return an engine that decodes ``rows`` sequences a step over a stand-in R-worker."""
    config = EngineConfig(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=dtype,
        max_num_seqs=rows,
        max_num_batched_tokens=max(rows, 2048),
        num_mini_batches=num_mini_batches,
        s_threads=threads,
    )
    return LLMEngine(config, StandInBackend())


def decode(engine: LLMEngine, rows: int, steps: int) -> ThroughputRun:
    """Compute ``rows`` one-token prompts, then run ``steps`` decode steps. Callers drop the first and the last step."""
    return run_throughput(engine, [WorkItem([1], steps + 1) for _ in range(rows)])
