"""``fastdecode bench perplexity``: measures the quality of cache dtypes."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fastdecode.api.engine_fields import DEMO_MODEL
from fastdecode.cli.flags import add_common_flags, add_engine_flags, engine_config
from fastdecode.cli.output import check_output_files, progress_bar, write_json
from fastdecode.core.errors import ConfigError

if TYPE_CHECKING:
    from fastdecode.engine.engine import LLMEngine


def add_command(commands: Any) -> None:
    parser = commands.add_parser("perplexity", help="how well the model predicts a text through the R-workers' cache")
    parser.add_argument(
        "--text", default=str(DEMO_MODEL / "heldout.txt"), metavar="FILE",
        help="text to predict (the demo model's held-out text)",
    )  # fmt: skip
    parser.add_argument(
        "--window", type=int, default=1024, metavar="TOKENS",
        help="length of the pieces of text that are predicted separately (1024)",
    )  # fmt: skip
    parser.add_argument("--output-json", metavar="FILE", help="file to write the figures to")
    add_engine_flags(parser)
    add_common_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print the perplexity of a text."""
    check_output_files(args.output_json)
    config = engine_config(args)
    if args.window < 2:
        raise ConfigError(f"window must be at least 2 tokens, not {args.window}")
    text = Path(args.text).read_text(encoding="utf-8")
    from fastdecode.engine.engine import LLMEngine

    engine = LLMEngine(config)
    try:
        if args.window > engine.s_model.max_model_len:
            raise ConfigError(f"window {args.window} is more than max_model_len {engine.s_model.max_model_len}")
        with progress_bar(None, "window") as bar:
            found = measure_perplexity(engine, text, args.window, bar.update)
        kv_dtype = engine.s_model.layout.kv_dtype
        print(
            f"Perplexity: {found.perplexity:.4f} per token over {found.num_tokens} tokens, "
            f"{found.bits_per_byte:.4f} bits per byte (KV cache {kv_dtype})"
        )
        write_json(asdict(found) | {"kv_cache_dtype": kv_dtype}, args.output_json)
    finally:
        engine.close()
    return 0


@dataclass(frozen=True)
class Perplexity:
    """``exp`` of the mean negative log-likelihood (natural log) over ``num_tokens`` predicted tokens."""

    num_tokens: int
    perplexity: float
    bits_per_byte: float


def measure_perplexity(
    engine: LLMEngine, text: str, window: int, on_window: Callable[[], object] = lambda: None
) -> Perplexity:
    """Return the perplexity of ``text``, cut into windows of ``window`` tokens that are scored independently.
    All attention, even of prompts, runs on an R-worker, so that it reads keys and values in the cache's dtype.
    """
    if engine.s_model.tokenizer is None:
        raise ConfigError("perplexity is measured on text: it needs the tokenizer (no --skip-tokenizer-init)")
    windows = cut(engine.s_model.tokenizer.encode(text), window)
    if not windows:
        raise ConfigError("the text is too short: it must have at least two tokens")
    logprobs = []
    for token_ids in windows:
        logprobs.append(engine.score(token_ids))
        on_window()
    scores = np.concatenate(logprobs)
    nats = -float(scores.mean())
    return Perplexity(len(scores), math.exp(nats), nats * len(scores) / math.log(2) / len(text.encode()))


def cut(token_ids: Sequence[int], window: int) -> list[list[int]]:
    """Return windows that overlap by one token, so that every token but the first is predicted in one window."""
    starts = range(0, len(token_ids) - 1, window - 1)
    return [list(token_ids[start : start + window]) for start in starts]
