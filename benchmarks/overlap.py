"""Measure whether two mini-batches hide an R-worker as slow as the S-worker: python benchmarks/overlap.py

A stand-in R-worker sleeps as long as the S-worker computes for one mini-batch and layer. With two mini-batches
overlap_efficiency = max(s, r) / wall should be near 1, with one near 0.5. Both are run in turn (A B A B); medians over
the rounds are printed.
"""

from __future__ import annotations

import argparse
import statistics

from models import decode, llama_folder, stand_in_engine
from stand_in import StandInBackend

from fastdecode.core.metrics import MODEL
from fastdecode.engine.engine import LLMEngine
from fastdecode.perfmodel.lab.measure.throughput_report import breakdown


def segment_seconds(engine: LLMEngine, rows: int) -> float:
    """Return the median S time of one mini-batch and layer, measured with an R-worker that answers at once."""
    engine.backend.call_seconds = 0.0
    engine.world.clock.recording = True
    decode(engine, rows, 3)
    engine.world.clock.recording = False
    spans = [span for span in engine.world.clock.intervals if span.state == MODEL and span.layer > 0]
    engine.world.clock.intervals.clear()
    return statistics.median(span.end_seconds - span.start_seconds for span in spans)


def efficiency(engine: LLMEngine, rows: int, steps: int) -> tuple[float, float]:
    """Return overlap_efficiency over the middle decode steps, and the seconds that the R-worker slept per layer."""
    assert isinstance(engine.backend, StandInBackend)
    segment = segment_seconds(engine, rows)
    engine.backend.call_seconds = segment
    run = decode(engine, rows, steps)
    middle = [step for step in run.steps if step.is_decode][1:-1]
    return breakdown(middle, separate_cores=True)["overlap_efficiency"], segment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=64, help="sequences per mini-batch (64)")
    parser.add_argument(
        "--layers", type=int, default=8, help="number of layers; filling and draining cost one S segment per step (8)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds (5)")
    parser.add_argument("--steps", type=int, default=6, help="decode steps per round (6)")
    args = parser.parse_args()
    folder = llama_folder(hidden=512, num_layers=args.layers)
    engines = {k: stand_in_engine(folder, args.rows * k, k, threads=1, dtype="float32") for k in (1, 2)}
    found: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(args.rounds):
        for k, engine in engines.items():
            value, segment = efficiency(engine, args.rows * k, args.steps)
            found[k].append(value)
            print(f"{k} mini-batch(es): S segment {segment * 1e3:.2f} ms, overlap_efficiency {value:.3f}", flush=True)
    for k, values in found.items():
        print(f"median with {k}: {statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})")


if __name__ == "__main__":
    main()
