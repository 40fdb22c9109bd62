"""Does a second R-worker help a job that already runs? python benchmarks/elastic.py

The S-worker has one thread on the first core, one R-worker one thread on the last, and the job is bound by the latter.
Then a second R-worker joins on the first core (its thread and the S-worker's share it), takes sequences over, and later
is told to end: its sequences move back. Tokens per second before, with it, and after; every token must be that of a
run without a change.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable

import numpy as np
from models import llama_folder

from fastdecode import SamplingParams
from fastdecode.config import EngineConfig
from fastdecode.engine import LLMEngine
from fastdecode.metrics import StepRecord

R_WORKER = [sys.executable, "-m", "fastdecode.cli.main", "r-worker", "--threads", "1"]


def main() -> None:
    """Print each phase's rate; exits 1 if any token differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=32, help="(32)")
    parser.add_argument("--prompt-len", type=int, default=1000, help="(1000)")
    parser.add_argument("--hidden", type=int, default=256, help="(256)")
    parser.add_argument("--heads", type=int, default=32, help="of 64 dims, each with its own keys and values (32)")
    parser.add_argument("--layers", type=int, default=2, help="(2)")
    parser.add_argument("--steps", type=int, default=40, help="decode steps of each phase (40)")
    args = parser.parse_args()
    folder = llama_folder(
        args.hidden, args.layers, group=1, intermediate=args.hidden, initializer_range=0.2, heads=args.heads
    )
    wanted = Job(folder, args).run(lambda job: None)
    job = Job(folder, args)
    job.run(_join_and_leave)
    if job.tokens != wanted.tokens:
        sys.exit("tokens differ from those of a run without a change")
    print("all tokens are those of a run without a change")


class Job:
    """Greedy sequences on one engine; ``phases`` holds the decode steps of each phase."""

    def __init__(self, folder: str, args: argparse.Namespace) -> None:
        first, last = min(os.sched_getaffinity(0)), max(os.sched_getaffinity(0))
        config = EngineConfig(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="float32",
            max_num_seqs=args.sequences,
            r_workers="spawn:1",
            s_threads=1,
            r_threads=1,
            s_cores=str(first),
            r_cores=str(last),
            kv_cache_memory="3GiB",
            pool_listen="127.0.0.1:0",
        )
        self.args, self.core = args, first
        self.engine = LLMEngine(config)
        self.steps: list[StepRecord] = []
        self.engine.on_step = self.steps.append
        self.tokens: dict[str, tuple[int, ...]] = {}

    def run(self, change: Callable[[Job], None]) -> Job:
        """All sequences to their ends, with ``change`` after the first phase."""
        params = SamplingParams(temperature=0, max_tokens=5 * self.args.steps, ignore_eos=True)
        prompts = np.random.default_rng(0).integers(0, 4096, (self.args.sequences, self.args.prompt_len)).tolist()
        for number, prompt in enumerate(prompts):
            self.engine.add_request(str(number), prompt, params)
        self.step_until(lambda: self.steps[-1].is_decode)
        change(self)
        self.step_until(lambda: not self.engine.has_unfinished_requests())
        self.engine.close()
        return self

    def phase(self, name: str) -> None:
        """Decode and print."""
        end = len(self.steps) + self.args.steps
        self.step_until(lambda: len(self.steps) == end)
        steps = [step for step in self.steps[-self.args.steps :] if step.is_decode]
        walls = [step.wall_seconds for step in steps]
        rate = sum(step.num_output_tokens for step in steps) / sum(walls)
        s_share = sum(step.s_seconds for step in steps) / sum(walls)
        print(
            f"{name}: {rate:.0f} tokens/s, step median {statistics.median(walls) * 1e3:.1f} ms "
            f"({min(walls) * 1e3:.1f} to {max(walls) * 1e3:.1f}), S busy {s_share:.0%}, loads {steps[-1].kv_loads}",
            flush=True,
        )

    def step_until(self, condition: Callable[[], bool]) -> None:
        """One step at least."""
        while True:
            for output in self.engine.step():
                self.tokens[output.request_id] = output.outputs[0].token_ids
            if condition():
                return


def _join_and_leave(job: Job) -> None:
    job.phase("one R-worker")
    pool = job.engine.backend.join_listener.address  # type: ignore[attr-defined]
    command = [*R_WORKER, "--join", pool, "--cores", str(job.core), "--kv-cache-memory", "3GiB"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as newcomer:
        job.step_until(lambda: len(job.engine.r_workers) == 2)
        job.phase("moving")
        job.phase("two R-workers")
        newcomer.send_signal(signal.SIGTERM)
        job.step_until(lambda: job.engine.scheduler.workers.present == [0])
    job.phase("one again")


if __name__ == "__main__":
    main()
