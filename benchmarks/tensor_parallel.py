"""Measure the S time of decode steps with two ranks, divided by one rank's: python benchmarks/tensor_parallel.py

The two are run in turn (A B A B), with one thread per rank. S time includes all-reduces, but not attention.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from models import llama_folder

from fastdecode import LLM, SamplingParams

LEAVE_OUT = 2
"""Steps left out at either end: prompts, and sequences that end."""


def s_seconds(folder: str, ranks: int, rows: int, steps: int) -> float:
    """Return the median S time of a decode step."""
    found: list[float] = []
    with LLM(
        folder, load_format="dummy", dtype="float32", device="cpu", skip_tokenizer_init=True, max_model_len=64,
        max_num_seqs=rows, max_num_batched_tokens=2 * rows, kv_cache_memory="1GiB", r_threads=1, s_threads=1,
        num_mini_batches=1, tensor_parallel_size=ranks, enable_prefix_caching=False, schedule="stall-free",
    ) as llm:  # fmt: skip

        def note(record: Any) -> None:
            if record.num_tokens == rows and record.is_decode:
                found.append(record.s_seconds)

        llm.engine.on_step = note
        params = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True, detokenize=False)
        llm.generate([{"prompt_token_ids": [1 + i % 100]} for i in range(rows)], params, use_tqdm=False)
    return statistics.median(found[LEAVE_OUT:-LEAVE_OUT])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=2048, help="hidden size (2048)")
    parser.add_argument("--rows", type=int, default=256, help="sequences of a step (256)")
    parser.add_argument("--layers", type=int, default=2, help="number of layers (2)")
    parser.add_argument("--steps", type=int, default=12, help="decode steps per measurement (12)")
    parser.add_argument("--rounds", type=int, default=2, help="number of rounds (2)")
    args = parser.parse_args()
    folder = str(llama_folder(args.hidden, args.layers))
    ratios = []
    for _ in range(args.rounds):
        one, two = (s_seconds(folder, ranks, args.rows, args.steps) for ranks in (1, 2))
        ratios.append(two / one)
        print(
            f"S time of a step: {one * 1e3:.1f} ms with one rank, {two * 1e3:.1f} ms with two: {two / one:.3f}",
            flush=True,
        )
    print(f"median {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()
