"""``fastdecode bench perplexity``: the quality meter for cache dtypes."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fastdecode.cli.flags import add_common_flags, add_engine_flags, engine_config
from fastdecode.config import DEMO_MODEL
from fastdecode.errors import ConfigError


def add_command(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser("perplexity", help="how well the model predicts a text through the R-workers' cache")
    parser.add_argument(
        "--text", default=str(DEMO_MODEL / "heldout.txt"), metavar="FILE", help="(the demo model's held-out text)"
    )
    parser.add_argument(
        "--window", type=int, default=1024, metavar="TOKENS", help="predicted from its first token on (1024)"
    )
    parser.add_argument("--output-json", metavar="FILE", help="write the figures")
    add_engine_flags(parser)
    add_common_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print one line."""
    config = engine_config(args)
    if args.window < 2:
        raise ConfigError(f"window must be at least 2 tokens, not {args.window}")
    text = Path(args.text).read_text(encoding="utf-8")
    from fastdecode.bench.perplexity import measure_perplexity
    from fastdecode.engine import LLMEngine

    engine = LLMEngine(config)
    try:
        if args.window > engine.s_model.max_model_len:
            raise ConfigError(f"window {args.window} is more than max_model_len {engine.s_model.max_model_len}")
        with tqdm(unit="window", disable=None if sys.stderr.isatty() else True) as bar:
            found = measure_perplexity(engine, text, args.window, lambda: bar.update() and None)
        kv_dtype = engine.s_model.layout.kv_dtype
    finally:
        engine.close()
    print(
        f"Perplexity: {found.perplexity:.4f} per token over {found.num_tokens} tokens, "
        f"{found.bits_per_byte:.4f} bits per byte (KV cache {kv_dtype})"
    )
    if args.output_json:
        Path(args.output_json).write_text(json.dumps(asdict(found) | {"kv_cache_dtype": kv_dtype}, indent=2) + "\n")
    return 0
