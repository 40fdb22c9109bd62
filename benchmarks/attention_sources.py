"""Measure the cost of attention sources for one request among many: python benchmarks/attention_sources.py MODEL

Caches are filled with random prompts. In every second decode step, one sequence asks for attention sources. Printed are
the ratio of the median step with sources to the median step without, the ratios of neighbouring steps, and the time of
the second pass, in which R-workers find the sources.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from typing import Any

import numpy as np

from fastdecode import LLM, SamplingParams
from fastdecode.perfmodel.lab.measure.decode_rig import random_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder of a model")
    parser.add_argument("--num-seqs", type=int, default=64, help="number of sequences (64)")
    parser.add_argument("--context-len", type=int, default=512, help="context of each, in tokens (512)")
    parser.add_argument("--steps", type=int, default=60, help="steps with and steps without sources (60)")
    parser.add_argument("--r-workers", default="inproc:1", help="R-workers, as for an engine (inproc:1)")
    parser.add_argument("--kv-cache-memory", default="3GiB", help="KV cache of each R-worker (3GiB)")
    args = parser.parse_args()
    settings: dict[str, Any] = {"max_num_seqs": args.num_seqs, "max_model_len": args.context_len + 2 * args.steps + 32}
    with LLM(args.model, r_workers=args.r_workers, kv_cache_memory=args.kv_cache_memory, **settings) as llm:
        without, with_one, second_pass = measure(llm, args.num_seqs, args.context_len, args.steps)
    for name, seconds in (("no sequence asks", without), ("one asks", with_one), ("the second pass", second_pass)):
        low, median, high = statistics.quantiles(seconds, n=4)
        print(f"{name}: {median * 1e3:.2f} ms a step (quartiles {low * 1e3:.2f} to {high * 1e3:.2f})")
    ratios = np.array(with_one) / np.array(without)
    low, _, high = np.quantile(ratios, (0.25, 0.5, 0.75))
    print(f"one of {args.num_seqs}: {statistics.median(with_one) / statistics.median(without):.4f} x a step; "
          f"pairs: median {np.median(ratios):.4f}, quartiles {low:.4f} to {high:.4f}; the second pass takes "
          f"{statistics.median(second_pass) / statistics.median(without):.4f} of a step")  # fmt: skip


def measure(llm: LLM, num_seqs: int, context_len: int, num_steps: int) -> tuple[list[float], list[float], list[float]]:
    """Return the seconds of decode steps without sources, of decode steps with sources, and of the second passes."""
    engine, rng = llm.llm_engine, np.random.default_rng(0)
    params = SamplingParams(temperature=0, max_tokens=2 * num_steps + 16, ignore_eos=True, detokenize=False)
    asking = replace(params, attention_sources=3)
    for number in range(num_seqs):
        prompt = rng.integers(0, engine.s_model.vocab_size, context_len).tolist()
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params if number else asking)
    asked, engine.in_flight.asking = engine.in_flight.asking, set()
    with random_prompts(engine.world):
        while engine.scheduler.snapshot().num_waiting or len(engine.scheduler.snapshot().sequences) < num_seqs:
            engine.step()
        engine.step()
    for _ in range(3):
        engine.step()
    seconds: tuple[list[float], list[float], list[float]] = ([], [], [])
    found = engine.world.sources.found

    def timed(*args: Any) -> Any:
        start = time.perf_counter()
        tokens = found(*args)
        if args[0].taps:
            seconds[2].append(time.perf_counter() - start)
        return tokens

    engine.world.sources.found = timed  # type: ignore[method-assign]
    for step in range(2 * num_steps):
        engine.in_flight.asking = asked if step % 2 else set()
        start = time.perf_counter()
        engine.step()
        seconds[step % 2].append(time.perf_counter() - start)
    engine.abort_request(map(str, range(num_seqs)))
    return seconds


if __name__ == "__main__":
    main()
