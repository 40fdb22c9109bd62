"""S time of a decode step beside its bare matrix products: python benchmarks/s_part.py

The same weights and rows, A B A B in one run; attention is a stand-in that answers at once.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from models import decode, llama_folder, stand_in_engine

from fastdecode.engine import LLMEngine


def bare_seconds(engine: LLMEngine, rows: int, packed: bool) -> float:
    """One pass through every linear layer (the head too): torch's own product, or the packed one the model uses."""
    linears = [module for module in engine.s_model.model.modules() if isinstance(module, torch.nn.Linear)]
    inputs = {
        linear.in_features: torch.randn(1, rows, linear.in_features, dtype=linear.weight.dtype) for linear in linears
    }
    with torch.inference_mode():
        start = time.perf_counter()
        for linear in linears:
            x = inputs[linear.in_features]
            linear(x) if packed else torch.nn.functional.linear(x, linear.weight, linear.bias)
        return time.perf_counter() - start


def s_seconds(engine: LLMEngine, rows: int) -> float:
    """S time of one decode step, embedding, norms, head and sampling included: the median of four steps."""
    steps = [step for step in decode(engine, rows, 5).steps if step.is_decode]
    return statistics.median(step.s_seconds for step in steps[:-1])


def main() -> None:
    """Print one line per number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, nargs="+", default=[2048, 1024], help="(2048 1024)")
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256, 1024], help="(64 256 1024)")
    parser.add_argument("--layers", type=int, default=6, help="(6)")
    parser.add_argument("--rounds", type=int, default=5, help="(5)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="(all)")
    parser.add_argument("--dtype", default="float32", help="(float32)")
    args = parser.parse_args()
    for hidden in args.hidden:
        folder = llama_folder(hidden, args.layers)
        for rows in args.rows:
            engine = stand_in_engine(folder, rows, 1, args.threads, args.dtype)
            found = [
                (s_seconds(engine, rows), bare_seconds(engine, rows, False), bare_seconds(engine, rows, True))
                for _ in range(args.rounds + 1)
            ][1:]
            ratios = [s / bare for s, bare, _ in found]
            print(
                f"hidden {hidden}, {rows} rows: S {statistics.median(s for s, _, _ in found) * 1e3:.1f} ms, "
                f"torch's bare products {statistics.median(bare for _, bare, _ in found) * 1e3:.1f} ms, ratio "
                f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}); over the packed products "
                f"{statistics.median(s / packed for s, _, packed in found):.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
