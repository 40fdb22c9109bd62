"""Measure the cost of losing an R-worker: python benchmarks/recovery.py --kills 20

64 greedy float32 sequences run on three R-workers. One of these is killed with ``kill -9`` at a random token, in the
middle of a step. Every sequence must get the same tokens as in an undisturbed run. There, the two best tokens always
differ by at least 1e-4 in log-probability, so that a wrong cache would show. With ``--stop 30`` the R-worker is stopped
for 30 s instead, and then wakes. With ``--tensor-parallel-size 2`` each of two ranks has three R-workers, and one
R-worker of a random rank is killed.

Printed for each kill: seconds until all sequences without loss have their next token; seconds until all sequences that
lost their cache have it, after recomputing; and how long as many tokens took as prompts at the start.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil
from models import llama_folder

from fastdecode import SamplingParams
from fastdecode.api.config import EngineConfig
from fastdecode.api.outputs import RequestOutput
from fastdecode.core.metrics import StepRecord
from fastdecode.engine.engine import LLMEngine

PROMPT_LEN, OUTPUT_LEN = 64, 96
LEAST_GAP = 1e-4
GREEDY = SamplingParams(temperature=0, max_tokens=OUTPUT_LEN, ignore_eos=True)
R_WORKER = [sys.executable, "-m", "fastdecode.cli.main", "r-worker", "--threads", "1", "--kv-cache-memory", "256MiB"]


@dataclass
class Blow:
    """Kills R-worker ``victim`` in the step after the ``moment``-th token, or stops it for ``stop_seconds``."""

    process: int
    victim: int
    moment: int
    stop_seconds: float | None
    struck: float = 0.0
    lost: dict[str, int] = field(default_factory=dict)
    _steps: list[float] = field(default_factory=list)
    _tokens: int = 0

    def watch(self, engine: LLMEngine, record: StepRecord) -> None:
        """Kill or stop the victim when its moment has come. Called after each step."""
        self._steps.append(record.wall_seconds)
        self._tokens += record.num_output_tokens
        if self._tokens >= self.moment and not self.lost:
            for sequence in engine.scheduler.store.residents.on(self.victim):
                request, _ = engine.in_flight.family(sequence.sequence_id)
                self.lost[request.request_id] = sequence.num_tokens
            threading.Timer(random.random() * statistics.median(self._steps), self._strike).start()

    def _strike(self) -> None:
        self.struck = time.perf_counter()
        os.kill(self.process, signal.SIGSTOP if self.stop_seconds else signal.SIGKILL)
        if self.stop_seconds:
            threading.Timer(self.stop_seconds, _wake, [self.process]).start()


@dataclass(frozen=True)
class Recovery:
    """Seconds from the kill to the next token.
    ``prefill_seconds``: the time that the lost tokens would take as prompts.
    """

    num_lost: int
    others_seconds: float
    lost_seconds: float
    prefill_seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="number of kills (20)")
    parser.add_argument("--sequences", type=int, default=64, help="number of sequences (64)")
    parser.add_argument(
        "--transport", choices=["spawn", "tcp"], default="spawn", help="how R-workers are connected (spawn)"
    )
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="ranks, with spawned R-workers (1)")
    parser.add_argument(
        "--stop", type=float, metavar="SECONDS", help="stop the R-worker for so long instead of killing it"
    )
    parser.add_argument("--seed", type=int, default=3, help="seed of prompts and kills (3)")
    args = parser.parse_args()
    folder, rng = llama_folder(256, 4, initializer_range=0.2), random.Random(args.seed)
    prompts = np.random.default_rng(args.seed).integers(0, 4096, (args.sequences, PROMPT_LEN)).tolist()
    wanted = _reference(folder, prompts)
    found: list[Recovery] = []
    for _ in range(args.kills):
        moment, victim = rng.randrange(1, args.sequences * (OUTPUT_LEN - 2)), rng.randrange(3)
        with contextlib.ExitStack() as stack:
            spec, processes = stack.enter_context(three_workers(args.transport))
            ranks = {"tensor_parallel_size": args.tensor_parallel_size}
            engine = stack.enter_context(small_engine(folder, spec, **ranks))
            own_pool = getattr(engine.backend, "pool", engine.backend)
            groups = [processes or [worker.link.process.pid for worker in own_pool.workers]]
            groups += [_spawned(rank) for rank in psutil.Process().children() if rank.pid not in groups[0]]
            blow = Blow(rng.choice(groups)[victim], victim, moment, args.stop)
            engine.on_step = lambda record, blow=blow, engine=engine: blow.watch(engine, record)
            outputs = run_requests(engine, prompts, GREEDY)
        if [output.outputs[0].token_ids for output in outputs] != wanted:
            sys.exit(f"worker {victim} at token {moment}: tokens differ from those of an undisturbed run")
        found.append(_recovery(blow, outputs))
        print(f"worker {victim} at token {moment}: {found[-1]}", flush=True)
    _summarise(found, args)


def _reference(folder: str, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """Return the tokens of an undisturbed run in this process. Exit if a wrong cache might not change these tokens."""
    with small_engine(folder, "inproc") as engine:
        outputs = run_requests(
            engine, prompts, SamplingParams(temperature=0, max_tokens=OUTPUT_LEN, ignore_eos=True, logprobs=2)
        )
    steps = [step for output in outputs for step in output.outputs[0].logprobs or ()]
    gap = min(abs(first.logprob - second.logprob) for first, second in (list(step.values())[:2] for step in steps))
    tokens = [output.outputs[0].token_ids for output in outputs]
    fewest = min(len(set(each)) for each in tokens)
    print(f"undisturbed: smallest gap {gap:.1e}, at least {fewest} different tokens in a sequence", flush=True)
    if gap < LEAST_GAP or fewest < 16:
        sys.exit("two tokens are nearly as likely, or they repeat: choose another --seed")
    return tokens


@contextlib.contextmanager
def three_workers(transport: str) -> Iterator[tuple[str, list[int]]]:
    """Yield the ``r_workers`` setting for three R-workers, and the process ids of those started here."""
    if transport == "spawn":
        yield "spawn:3", []
        return
    with listening_workers() as found:
        yield found


@contextlib.contextmanager
def listening_workers() -> Iterator[tuple[str, list[int]]]:
    """Start three R-workers over TCP; yield the ``r_workers`` setting and their process ids."""
    command = [*R_WORKER, "--listen", "tcp://127.0.0.1:0"]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    try:
        lines = [process.stdout.readline() for process in processes if process.stdout]
        yield ",".join(line.split("tcp://")[1].split()[0] for line in lines), [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextlib.contextmanager
def small_engine(folder: str, r_workers: str, **settings: Any) -> Iterator[LLMEngine]:
    """Yield an engine in float32, unless ``settings`` say otherwise, with 256 MiB on each of ``r_workers``."""
    here = ":" not in r_workers or r_workers.startswith(("spawn", "inproc"))
    memory: dict[str, Any] = {"kv_cache_memory": "256MiB", "r_threads": 1} if here else {}
    settings = {"dtype": "float32", "load_format": "dummy", "skip_tokenizer_init": True} | memory | settings
    engine = LLMEngine(EngineConfig(model=folder, r_workers=r_workers, **settings))
    try:
        yield engine
    finally:
        engine.close()


def run_requests(engine: LLMEngine, prompts: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
    """Run all prompts to their ends; return outputs in the order of prompts."""
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, params)
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {int(output.request_id): output for output in engine.step()}
    return [outputs[number] for number in range(len(prompts))]


def _recovery(blow: Blow, outputs: list[RequestOutput]) -> Recovery:
    next_token = {output.request_id: _after(output, blow.struck) for output in outputs}
    others = [seconds for name, seconds in next_token.items() if name not in blow.lost]
    lost = [seconds for name, seconds in next_token.items() if name in blow.lost]
    prefill = max(each.metrics.token_seconds[0] for each in outputs) - min(
        each.metrics.arrival_seconds for each in outputs
    )
    per_token = prefill / (len(outputs) * PROMPT_LEN)
    return Recovery(len(lost), max(others, default=0.0), max(lost, default=0.0), sum(blow.lost.values()) * per_token)


def _after(output: RequestOutput, moment: float) -> float:
    """Return the seconds from ``moment`` to the next token; 0 if no token was left to generate."""
    return next((seconds - moment for seconds in output.metrics.token_seconds if seconds > moment), 0.0)


def _summarise(found: list[Recovery], args: argparse.Namespace) -> None:
    for name in ("others_seconds", "lost_seconds", "prefill_seconds"):
        values = [getattr(each, name) for each in found]
        print(f"{name}: median {statistics.median(values):.2f}, most {max(values):.2f}")
    later = max(each.lost_seconds - each.prefill_seconds for each in found)
    print(f"{sum(each.num_lost for each in found)} rebuilt, at most {later:.2f} s later than their prefill takes")
    print(f"all tokens of {args.kills} x {args.sequences} sequences are those of an undisturbed run")


def _spawned(rank: psutil.Process) -> list[int]:
    """Return the process ids of the R-workers of another rank, in the order in which they were started."""
    return [child.pid for child in sorted(rank.children(), key=lambda child: child.create_time())]


def _wake(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGCONT)


if __name__ == "__main__":
    main()
