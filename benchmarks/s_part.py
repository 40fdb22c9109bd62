"""S time of a decode step beside its bare matrix products: python benchmarks/s_part.py

The same weights and rows, A B A B in one run; attention is a stand-in that answers at once. On a machine that others
use too, ``--clock cpu`` counts the CPU time of one thread instead.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from models import decode, llama_folder, stand_in_engine

from fastdecode.engine import LLMEngine

Clock = Callable[[], float]


class Products:
    """The linear layers of an engine's model (the head too), and their weights as torch's own product reads them."""

    def __init__(self, engine: LLMEngine) -> None:
        modules = engine.s_model.model.modules()
        self._linears = [module for module in modules if isinstance(module, torch.nn.Linear)]
        self._weights = [linear.state_dict()["weight"] for linear in self._linears]

    def seconds(self, rows: int, clock: Clock, packed: bool) -> float:
        """One pass through every layer: torch's own product, or the packed one that the model uses."""
        dtype = self._weights[0].dtype
        widths = {linear.in_features for linear in self._linears}
        inputs = {width: torch.randn(1, rows, width).to(dtype) for width in widths}
        with torch.inference_mode():
            start = clock()
            for linear, weight in zip(self._linears, self._weights, strict=True):
                x = inputs[linear.in_features]
                linear(x) if packed else torch.nn.functional.linear(x, weight, linear.bias)
            return clock() - start


def s_seconds(engine: LLMEngine, rows: int, clock: Clock) -> float:
    """S time of one decode step, embedding, norms, head and sampling included: the median of four steps."""
    run, found = engine.world.s_worker.run, []

    def timed(*arguments: Any) -> Any:
        start = clock()
        tokens = run(*arguments)
        found.append(clock() - start)
        return tokens

    engine.world.s_worker.run = timed  # type: ignore[method-assign]
    try:
        decode(engine, rows, 5)
    finally:
        del engine.world.s_worker.run  # type: ignore[method-assign]
    return statistics.median(found[1:-1])  # the first computes the prompts


def report(hidden: int, rows: int, args: argparse.Namespace, dtype: str) -> None:
    """Print one line."""
    clock = time.thread_time if args.clock == "cpu" else time.perf_counter
    threads = 1 if args.clock == "cpu" else args.threads
    engine = stand_in_engine(llama_folder(hidden, args.layers), rows, 1, threads, dtype)
    products = Products(engine)
    found = [
        (s_seconds(engine, rows, clock), *(products.seconds(rows, clock, packed) for packed in (True, False)))
        for _ in range(args.rounds + 1)
    ][1:]
    engine.close()
    packed_ratios = sorted(s / packed for s, packed, _ in found)
    print(
        f"{dtype}, hidden {hidden}, {rows} rows: S {statistics.median(s for s, _, _ in found) * 1e3:.1f} ms; over the "
        f"packed products {statistics.median(packed_ratios):.3f} ({packed_ratios[0]:.3f} to {packed_ratios[-1]:.3f}), "
        f"over torch's {statistics.median(s / bare for s, _, bare in found):.3f}",
        flush=True,
    )


def main() -> None:
    """Print one line per number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, nargs="+", default=[1024, 2048], help="(1024 2048)")
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256, 1024], help="(64 256 1024)")
    parser.add_argument("--layers", type=int, default=6, help="(6)")
    parser.add_argument("--rounds", type=int, default=5, help="(5)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="with --clock wall (all)")
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"], help="(bfloat16 float32)")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: of one thread (wall)")
    args = parser.parse_args()
    for dtype in args.dtype:
        for hidden in args.hidden:
            for rows in args.rows:
                report(hidden, rows, args, dtype)


if __name__ == "__main__":
    main()
