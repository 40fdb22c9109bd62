"""What does the loss of an R-worker cost? python benchmarks/recovery.py --kills 20

64 greedy float32 sequences on three R-workers, of which one is killed with ``kill -9`` at a random token, in the middle
of a step. Every sequence must get the tokens of an undisturbed run, whose two best logits are nowhere closer than 1e-4,
so that a wrong cache shows. With ``--stop 30`` it is stopped for so long instead, and then wakes.

Printed for each: seconds from the kill to the last of the other sequences' next token, and to the last of the lost
ones' (which are computed again), beside the seconds that the same tokens took as prompts.
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
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from models import llama_folder

from fastdecode import SamplingParams
from fastdecode.config import EngineConfig
from fastdecode.engine import LLMEngine
from fastdecode.outputs import RequestOutput

PROMPT_LEN, OUTPUT_LEN = 64, 96
LEAST_GAP = 1e-4


@dataclass(frozen=True)
class Recovery:
    """Seconds after a kill, and what the lost tokens would take as prompts."""

    others_seconds: float
    lost_seconds: float
    prefill_seconds: float
    num_lost: int


def main() -> None:
    """Kill and compare; exits 1 if any token differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="(20)")
    parser.add_argument("--sequences", type=int, default=64, help="(64)")
    parser.add_argument("--transport", choices=["spawn", "tcp"], default="spawn", help="(spawn)")
    parser.add_argument("--stop", type=float, metavar="SECONDS", help="SIGSTOP for so long, in place of SIGKILL")
    parser.add_argument("--seed", type=int, default=0, help="(0)")
    args = parser.parse_args()
    folder, rng = llama_folder(256, 4, initializer_range=0.2), random.Random(args.seed)
    prompts = np.random.default_rng(args.seed).integers(0, 4096, (args.sequences, PROMPT_LEN)).tolist()
    wanted = _reference(folder, prompts)
    found = []
    for number in range(args.kills):
        moment, victim = rng.randrange(1, args.sequences * OUTPUT_LEN), rng.randrange(3)
        found.append(_disturbed(folder, prompts, wanted, moment, victim, args))
        print(f"{number}: worker {victim} at token {moment}: {found[-1]}", flush=True)
    for name in ("others_seconds", "lost_seconds", "prefill_seconds"):
        values = [getattr(each, name) for each in found if each.num_lost]
        print(f"{name}: median {statistics.median(values):.2f}, most {max(values):.2f}")
    later = max(each.lost_seconds - each.prefill_seconds for each in found)
    print(f"{sum(each.num_lost for each in found)} sequences lost and rebuilt, at most {later:.2f} s after their prefill")
    print(f"all tokens of {args.kills} x {args.sequences} sequences are those of an undisturbed run")


def _reference(folder: str, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """Tokens of an undisturbed run in this process; RuntimeError where they prove little."""
    engine = _engine(folder, "inproc")
    outputs = _run(engine, prompts, SamplingParams(temperature=0, max_tokens=OUTPUT_LEN, ignore_eos=True, logprobs=2))
    engine.close()
    steps = [step for output in outputs for step in output.outputs[0].logprobs or ()]
    best = np.sort([[each.logprob for each in step.values()][:2] for step in steps])
    gap = float((best[:, 1] - best[:, 0]).min())
    tokens = [output.outputs[0].token_ids for output in outputs]
    fewest = min(len(set(each)) for each in tokens)
    print(f"reference: smallest gap {gap:.1e}, at least {fewest} different tokens in a sequence", flush=True)
    if gap < LEAST_GAP or fewest < 16:
        raise RuntimeError("two tokens are nearly as likely, or they repeat: choose another --seed")
    return tokens


def _disturbed(
    folder: str, prompts: list[list[int]], wanted: list[tuple[int, ...]], moment: int, victim: int, args: argparse.Namespace
) -> Recovery:
    with _workers(args.transport) as (spec, pids):
        engine = _engine(folder, spec)
        try:
            process = (pids or [worker._path._process.pid for worker in engine.backend.workers])[victim]
            return _kill_while_running(engine, prompts, wanted, moment, victim, process, args.stop)
        finally:
            engine.close()


def _kill_while_running(
    engine: LLMEngine,
    prompts: list[list[int]],
    wanted: list[tuple[int, ...]],
    moment: int,
    victim: int,
    process: int,
    stop_seconds: float | None,
) -> Recovery:
    done: list[float] = []
    steps: list[float] = []
    lost: dict[str, int] = {}

    def kill() -> None:
        done.append(time.perf_counter())
        os.kill(process, signal.SIGSTOP if stop_seconds else signal.SIGKILL)
        if stop_seconds:
            threading.Timer(stop_seconds, _wake, [process]).start()

    def watch(outputs: list[RequestOutput], step_seconds: float) -> None:
        steps.append(step_seconds)
        if not lost and sum(len(output.outputs[0].token_ids) for output in engine_outputs.values()) >= moment:
            for sequence in engine.scheduler.residents.on(victim):
                request, _ = engine._in_flight.family(sequence.sequence_id)
                lost[request.request_id] = sequence.num_tokens
            threading.Timer(random.random() * statistics.median(steps), kill).start()

    engine_outputs: dict[str, RequestOutput] = {}
    outputs = _run(engine, prompts, SamplingParams(temperature=0, max_tokens=OUTPUT_LEN, ignore_eos=True), watch, engine_outputs)
    if [output.outputs[0].token_ids for output in outputs] != wanted:
        print("tokens differ from the undisturbed run")
        raise SystemExit(1)
    (killed,) = done
    later = {output.request_id: _next_token(output, killed) - killed for output in outputs if _next_token(output, killed)}
    start = min(output.metrics.arrival_seconds for output in outputs)
    prefill = max(output.metrics.token_seconds[0] for output in outputs) - start
    rate = prefill / (len(prompts) * PROMPT_LEN)
    return Recovery(
        max((seconds for name, seconds in later.items() if name not in lost), default=0.0),
        max((seconds for name, seconds in later.items() if name in lost), default=0.0),
        sum(lost.values()) * rate,
        len(lost),
    )


def _next_token(output: RequestOutput, moment: float) -> float:
    """When the first token after ``moment`` came; 0 where none did."""
    return next((seconds for seconds in output.metrics.token_seconds if seconds > moment), 0.0)


def _wake(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGCONT)
