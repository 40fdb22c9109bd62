"""Compare int8 matrix products, row kernels included, with packed bfloat16 ones: python benchmarks/integer_products.py

The two are measured in turn (A B A B) on one thread, in CPU time; the best time of each counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch

from fastdecode.sworker.model.prepack import SharedProduct
from fastdecode.sworker.products.codes import block_of, quantized, set_codes
from fastdecode.sworker.products.linears import IntegerLinears

SHAPES = ((4096, 1024), (1024, 2816), (4096, 4096))


def best_seconds(ways: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the least CPU time of each function, measured in turns."""
    found = dict.fromkeys(ways, float("inf"))
    for _ in range(repeats):
        for name, way in ways.items():
            start = time.thread_time()
            way()
            found[name] = min(found[name], time.thread_time() - start)
    return found


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15, help="number of repeats (15)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for outputs, inputs in SHAPES:
        plain = torch.nn.Linear(inputs, outputs, bias=False).bfloat16().requires_grad_(False)
        product = SharedProduct([plain]).forward_of(0)
        set_codes(plain, quantized(plain.weight, block_of(inputs, inputs // 64, True)))
        IntegerLinears(torch.nn.Sequential(plain))
        for num_rows in (1, 3, 16, 64, 256, 1024):
            rows = torch.randn(num_rows, inputs).bfloat16()
            ways = {"bfloat16": partial(product, rows), "int8": partial(plain.forward, rows)}
            seconds = best_seconds(ways, args.repeats)
            ratio = seconds["bfloat16"] / seconds["int8"]
            print(f"{outputs} x {inputs}, {num_rows} rows: {ratio:.2f} x bfloat16", flush=True)


if __name__ == "__main__":
    main()
