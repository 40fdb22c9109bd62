"""As many requests as slots: the load-stabilizing schedule must cost nothing. python benchmarks/plain_run.py

Total seconds of the same requests under two schedules with default settings, A B A B.
"""

from __future__ import annotations

import argparse
import statistics

from models import llama_folder

from fastdecode.config import SCHEDULE_NAMES, EngineConfig
from fastdecode.engine import LLMEngine
from fastdecode.measure.dataset import WorkItem
from fastdecode.measure.throughput import run_throughput, warm_up


def main() -> None:
    """Print every round and the ratio of the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", nargs=2, default=["fcfs", "sls"], choices=SCHEDULE_NAMES, help="(fcfs sls)")
    parser.add_argument("--requests", type=int, default=64, help="and slots (64)")
    parser.add_argument("--prompt-len", type=int, default=128, help="(128)")
    parser.add_argument("--output-len", type=int, default=256, help="(256)")
    parser.add_argument("--hidden", type=int, default=512, help="(512)")
    parser.add_argument("--layers", type=int, default=4, help="(4)")
    parser.add_argument("--rounds", type=int, default=4, help="(4)")
    args = parser.parse_args()
    folder = llama_folder(args.hidden, args.layers, group=1)
    seconds: dict[str, list[float]] = {schedule: [] for schedule in args.schedules}
    for _ in range(args.rounds):
        for schedule, found in seconds.items():
            found.append(_total_seconds(folder, schedule, args))
            print(f"{schedule}: {found[-1]:.2f} s", flush=True)
    first, second = (statistics.median(found) for found in seconds.values())
    ratios = [b / a for a, b in zip(*seconds.values(), strict=True)]
    print(f"{' / '.join(reversed(args.schedules))}: {second / first:.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


def _total_seconds(folder: str, schedule: str, args: argparse.Namespace) -> float:
    config = EngineConfig(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        schedule=schedule,
        max_num_seqs=args.requests,
    )
    engine = LLMEngine(config)
    try:
        items = [WorkItem([1 + i] * args.prompt_len, args.output_len) for i in range(args.requests)]
        warm_up(engine, items)
        return run_throughput(engine, items).elapsed_seconds
    finally:
        engine.close()


if __name__ == "__main__":
    main()
