"""One decode of one layer of DeepSeek-V3's shape: attention over latents, alone and with K and V multiplied there.

Beside these, the same products on an S-worker's CPU, and as torch does them in bfloat16.

    chrt -f 50 python benchmarks/latent_absorption.py

One thread, bfloat16; medians of runs in turns.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import torch

from fastdecode import _rworker
from fastdecode.kinds import Absorption, Latent, Layer
from fastdecode.sworker.adapters.latents import multiplied_by_head

HEADS, RANK, ROPE, NOPE, VALUE = 128, 512, 64, 128, 128
LATENT = Latent(HEADS, 1, RANK + ROPE, RANK, 0.07)
LAYERS = {"s": LATENT, "r": replace(LATENT, absorption=Absorption(NOPE, VALUE))}
SIZES = ((1, 1024), (16, 1024), (64, 512), (256, 64))
"""Sequences, and tokens of each."""


class Side:
    """An R-worker of one layer that holds random rows."""

    def __init__(self, layer: Layer, weights: np.ndarray, batch: int, context: int) -> None:
        self._layer, self._rng, self._batch, self._context = layer, np.random.default_rng(1), batch, context
        blocks = batch * (context // 32 + 4)
        self._worker = _rworker.RWorker(
            layers=[layer], model_dtype="bfloat16", kv_dtype="bfloat16", block_size=32, num_blocks=blocks, num_threads=1
        )
        if layer.absorption:
            self._worker.set_weights(0, 0, weights)
        for number in range(batch):
            self._run([(number, 0, context, 0)], 0, context)

    def decode(self) -> float:
        """Seconds of one more token of every sequence."""
        spans = [(number, self._context, 1, 1) for number in range(self._batch)]
        self._context += 1
        return self._run(spans, self._batch, self._batch)

    def _run(self, spans: list[tuple[int, int, int, int]], attending: int, stored: int) -> float:
        counts = (attending, stored, stored, attending)
        rows = [random_bits(self._rng, n, *shape) for n, shape in zip(counts, self._layer.row_shapes, strict=True)]
        self._worker.begin_step(np.zeros((0, 4), np.int64), [np.array(spans, np.int64)])
        begin = time.perf_counter()
        self._worker.run(0, 0, *rows)
        seconds = time.perf_counter() - begin
        self._worker.end_step()
        return seconds


def random_bits(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Numbers of bfloat16 as their bits."""
    return (rng.standard_normal(shape, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)


def torch_seconds(weights: torch.Tensor, batch: int, product: Any) -> float:
    """K with queries and V with outputs of ``batch`` rows."""
    q, o = (torch.ones((1, HEADS, batch, dim), dtype=weights.dtype) for dim in (NOPE, RANK))
    begin = time.perf_counter()
    product(q, weights[:, :NOPE])
    product(o, weights[:, NOPE:].mT)
    return time.perf_counter() - begin


def main() -> None:
    """Print a row for each of SIZES."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = range(parser.parse_args().rounds)
    torch.set_num_threads(1)
    bits = random_bits(np.random.default_rng(0), HEADS, NOPE + VALUE, RANK)
    weights = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    for batch, context in SIZES:
        sides = {name: Side(layer, bits, batch, context) for name, layer in LAYERS.items()}
        times = [[side.decode() for side in sides.values()] for _ in rounds]
        here, there = (1e3 * median(column) for column in zip(*times, strict=True))
        ours, plain = (
            1e3 * median(torch_seconds(weights, batch, product) for _ in rounds[:3])
            for product in (multiplied_by_head, torch.matmul)
        )
        rate = batch * HEADS * RANK * (NOPE + VALUE) / (there - here) / 1e6
        print(
            f"{batch} sequences of {context}: attention {here:.2f} ms, with K and V {there:.2f} ms ({rate:.1f} billion "
            f"multiply-adds a second); K and V on the S-worker {ours:.1f} ms, by torch in bfloat16 {plain:.1f} ms"
        )


if __name__ == "__main__":
    main()
