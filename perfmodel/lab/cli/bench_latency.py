"""``fastdecode bench latency``: the time of one batch of requests from start to last token, as in vLLM."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fastdecode.api.sampling_params import SamplingParams
from fastdecode.cli.flags import add_common_flags, add_engine_flags, engine_config
from fastdecode.cli.output import check_output_files, progress_bar, write_json
from fastdecode.core.errors import ConfigError
from fastdecode.perfmodel.lab.cli.vllm_bench import add_bench_flags, check_bench_flags

if TYPE_CHECKING:
    from fastdecode.llm import LLM

COUNTS = {
    "input_len": (32, "TOKENS", "length of each prompt of random tokens"),
    "output_len": (128, "TOKENS", "length of each output, beyond any end of text"),
    "batch_size": (8, "N", "prompts of a batch"),
    "n": (1, "N", "outputs per prompt"),
    "num_iters_warmup": (10, "N", "batches before the measured ones"),
    "num_iters": (30, "N", "measured batches"),
}
"""Flags with default, metavar and help."""


def add_command(commands: Any) -> None:
    parser = commands.add_parser("latency", help="seconds that one batch of requests takes")
    group = parser.add_argument_group("batch")
    for name, (default, metavar, text) in COUNTS.items():
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(flag, type=int, default=default, metavar=metavar, help=f"{text} ({default})")
    group.add_argument("--disable-detokenize", action="store_true", help="do not convert tokens to text")
    parser.add_argument("--output-json", metavar="FILE", help="file to write every figure to")
    add_engine_flags(parser)
    add_common_flags(parser)
    add_bench_flags(parser)
    parser.set_defaults(run=run, enable_prefix_caching=False)  # else only the first iteration would compute prompts


def run(args: argparse.Namespace) -> int:
    """Time the batches and print latencies in vLLM's format; after Ctrl-C, print those of the finished batches."""
    for name in COUNTS:
        least = 0 if name == "num_iters_warmup" else 1
        if getattr(args, name) < least:
            raise ConfigError(f"{name} must be at least {least}, not {getattr(args, name)}")
    check_bench_flags(args)
    config = engine_config(args)
    check_output_files(args.output_json)
    from fastdecode.llm import LLM

    latencies: list[float] = []
    interrupted: KeyboardInterrupt | None = None
    with LLM(**vars(config)) as llm:
        try:
            _time_batches(llm, args, latencies)
        except KeyboardInterrupt as stop:
            interrupted = stop
        if latencies:  # report before the engine is closed, which may fail
            report = latency_report(latencies)
            print(*latency_lines(report), sep="\n", flush=True)
            write_json(report, args.output_json)
    if interrupted:
        raise interrupted
    return 0


def _time_batches(llm: LLM, args: argparse.Namespace, latencies: list[float]) -> None:
    model = llm.engine.s_model
    if args.input_len + args.output_len > model.max_model_len:
        raise ConfigError(
            f"input_len + output_len is {args.input_len + args.output_len}, and max_model_len is {model.max_model_len}"
        )
    rng = np.random.default_rng(args.seed)
    prompts = rng.integers(0, model.vocab_size, (args.batch_size, args.input_len)).tolist()
    params = SamplingParams(
        n=args.n, temperature=1.0, max_tokens=args.output_len, ignore_eos=True, detokenize=not args.disable_detokenize
    )
    with progress_bar(args.num_iters_warmup + args.num_iters, "batch") as bar:
        for index in range(args.num_iters_warmup + args.num_iters):
            start = time.perf_counter()
            llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
            if index >= args.num_iters_warmup:
                latencies.append(time.perf_counter() - start)
            bar.update()


def latency_report(latencies: Sequence[float]) -> dict[str, Any]:
    """Return the report with vLLM's keys, in seconds."""
    percentiles = (10, 25, 50, 75, 90, 99)
    return {
        "avg_latency": float(np.mean(latencies)),
        "std_latency": float(np.std(latencies)),
        "latencies": list(latencies),
        "percentiles": {str(each): float(np.percentile(latencies, each)) for each in percentiles},
    }


def latency_lines(report: dict[str, Any]) -> list[str]:
    """Return the lines to print, in the format of ``vllm bench latency``."""
    return [
        f"Avg latency: {report['avg_latency']} seconds",
        f"Std latency: {report['std_latency']} seconds",
        *(f"{each}% percentile latency: {seconds} seconds" for each, seconds in report["percentiles"].items()),
    ]
