"""One system prompt, many requests: time to first token with and without prefix caching.

python benchmarks/prefix_caching.py: requests sent together that share a prefix, A B A B.
"""

from __future__ import annotations

import argparse
import statistics

import numpy as np
from models import llama_folder

from fastdecode.config import EngineConfig
from fastdecode.engine import LLMEngine
from fastdecode.measure.dataset import WorkItem
from fastdecode.measure.throughput import run_throughput, warm_up


def main() -> None:
    """Print both means and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=64, help="(64)")
    parser.add_argument("--prefix-len", type=int, default=1500, help="(1500)")
    parser.add_argument("--own-len", type=int, default=50, help="(50)")
    parser.add_argument("--output-len", type=int, default=8, help="(8)")
    parser.add_argument("--hidden", type=int, default=512, help="(512)")
    parser.add_argument("--layers", type=int, default=4, help="(4)")
    parser.add_argument("--rounds", type=int, default=3, help="(3)")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    prefix = rng.integers(0, 4096, args.prefix_len).tolist()
    prompts = [prefix + rng.integers(0, 4096, args.own_len).tolist() for _ in range(args.requests)]
    folder = llama_folder(args.hidden, args.layers)
    means: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(args.rounds):
        for caching, found in means.items():
            mean, hit_tokens = _mean_ttft(folder, prompts, args.output_len, caching)
            found.append(mean)
            print(
                f"caching {caching}: mean time to first token {mean:.3f} s, {hit_tokens} prompt tokens found",
                flush=True,
            )
    ratios = [with_it / without for without, with_it in zip(means[False], means[True], strict=True)]
    print(f"with / without caching: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


def _mean_ttft(folder: str, prompts: list[list[int]], output_len: int, caching: bool) -> tuple[float, int]:
    config = EngineConfig(
        model=folder, load_format="dummy", skip_tokenizer_init=True, dtype="float32", enable_prefix_caching=caching
    )
    engine = LLMEngine(config)
    try:
        items = [WorkItem(prompt, output_len) for prompt in prompts]
        warm_up(engine, items)
        run = run_throughput(engine, items)
    finally:
        engine.close()
    first = [output.metrics.token_seconds[0] - output.metrics.arrival_seconds for output in run.outputs]
    return statistics.mean(first), run.statistics.prefix_hit_tokens


if __name__ == "__main__":
    main()
