"""Two R-workers with unequal shares of one core: python benchmarks/cgroup_share.py (as root)

Two spawned R-workers of one thread each are bound to the last core, in cgroups with CPU weights 2:1; the S-worker has
one thread on the first. The scheduler is not told of the weights. Sequences come and go, and the KV load should settle
at 2:1, with steps that take as long as those of one R-worker that has both shares, measured in turns, A B A B.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
from cluster_throughput import ContextFiller, settings_for

from fastdecode.config import EngineConfig
from fastdecode.engine import LLMEngine
from fastdecode.metrics import StepRecord
from fastdecode.sampling_params import SamplingParams

ROOT = Path("/sys/fs/cgroup")
WEIGHTS = (2, 1)
MOST_OUTPUT = 128
"""Tokens of the longest output; the shortest has half as many."""


class Churn:
    """Keeps an engine's seats taken: a request that ends is followed by another, four at a time, of random length."""

    def __init__(self, engine: LLMEngine, args: argparse.Namespace) -> None:
        engine._s_worker = ContextFiller(engine._s_worker)  # type: ignore[assignment]
        self._engine, self._args = engine, args
        self._lengths = np.random.default_rng(1)
        self._numbers = itertools.count()
        self._free = args.sequences

    def decode_steps(self, num_steps: int) -> list[StepRecord]:
        """The records of the next ``num_steps`` steps in which no request starts."""
        steps: list[StepRecord] = []
        self._engine.on_step = lambda step: steps.append(step) if step.is_decode else None
        while len(steps) < num_steps:
            while self._free >= 4:
                self._add()
            self._free += sum(output.finished for output in self._engine.step())
        return steps

    def _add(self) -> None:
        for _ in range(4):
            length = int(self._lengths.integers(MOST_OUTPUT // 2, MOST_OUTPUT))
            params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
            prompt = {"prompt_token_ids": [1] * self._args.context}
            self._engine.add_request(str(next(self._numbers)), prompt, params)
        self._free -= 4


def main() -> None:
    """Print how the load moves, then step times beside those of one R-worker alone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=2048, help="tokens of each prompt (2048)")
    parser.add_argument("--sequences", type=int, default=128, help="in flight (128)")
    parser.add_argument("--hidden", type=int, default=256, help="(256)")
    parser.add_argument("--intermediate", type=int, default=64, help="few: R is to be what takes time (64)")
    parser.add_argument("--layers", type=int, default=4, help="(4)")
    parser.add_argument("--settle", type=int, default=400, help="decode steps before measuring (400)")
    parser.add_argument("--steps", type=int, default=20, help="decode steps of a turn (20)")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each (7)")
    args = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("cgroup_share: cgroups need root")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit("cgroup_share: needs two cores")
    settings = settings_for(args, cores[0]) | {"r_threads": 1, "r_cores": str(cores[-1])}
    with contextlib.ExitStack() as cleanup:
        weights = (*WEIGHTS, sum(WEIGHTS))
        *groups, whole = (cleanup.enter_context(cgroup(index, weight)) for index, weight in enumerate(weights))
        configs = [EngineConfig(**settings, r_workers=spec) for spec in ("spawn:1", "spawn:2")]
        alone = LLMEngine(configs[0])
        cleanup.callback(alone.close)
        _enter(whole, *_newest_r_workers(1))
        shared = LLMEngine(configs[1])
        cleanup.callback(shared.close)
        for group, process in zip(groups, _newest_r_workers(2), strict=True):
            _enter(group, process)
        _compare(Churn(alone, args), Churn(shared, args), args)


def _compare(alone: Churn, shared: Churn, args: argparse.Namespace) -> None:
    for start in range(0, args.settle, args.settle // 8):
        print(f"decode step {start}: loads {_split(shared.decode_steps(args.settle // 8)):.2f} : 1", flush=True)
    alone.decode_steps(args.steps)
    ratios, splits = [], []
    for _ in range(args.rounds):
        beside, found = alone.decode_steps(args.steps), shared.decode_steps(args.steps)
        splits.append(_split(found))
        ratios.append(_per_token(found) / _per_token(beside))
        print(f"{_per_step(beside)} alone, {_per_step(found)} shared: {ratios[-1]:.3f}", flush=True)
    for name, values in (("loads, first to second", splits), ("step time / alone", ratios)):
        print(f"{name}: {statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})")


def _split(steps: list[StepRecord]) -> float:
    first, second = np.sum([step.kv_loads for step in steps], axis=0)
    return float(first / second)


def _per_token(steps: list[StepRecord]) -> float:
    """Seconds of a step by its KV tokens, of which the two engines may have a few more or less."""
    return statistics.median(step.wall_seconds / step.kv_load for step in steps)


def _per_step(steps: list[StepRecord]) -> str:
    busy = " and ".join(
        f"{np.median(part) * 1e3:.1f}" for part in zip(*(step.r_seconds for step in steps), strict=True)
    )
    wall = statistics.median(step.wall_seconds for step in steps)
    return f"{wall * 1e3:.1f} ms (S {statistics.median(step.s_seconds for step in steps) * 1e3:.1f}, R {busy})"


@contextlib.contextmanager
def cgroup(index: int, weight: int) -> Iterator[Path]:
    """A folder of the kernel's for processes with this part of the CPU; removed at the end, when they have ended."""
    unified = "cpu" in (ROOT / "cgroup.subtree_control").read_text().split() if _is_v2() else False
    if _is_v2() and not unified:
        sys.exit(f"cgroup_share: the cpu controller is not on: echo +cpu > {ROOT}/cgroup.subtree_control")
    folder = (ROOT if unified else ROOT / "cpu") / f"fastdecode-benchmark-{index}"
    folder.mkdir(exist_ok=True)  # one that a killed run left is empty
    try:
        (folder / ("cpu.weight" if unified else "cpu.shares")).write_text(str(weight * (100 if unified else 1024)))
        yield folder
    finally:
        with contextlib.suppress(FileNotFoundError):
            _remove(folder)


def _enter(folder: Path, process: psutil.Process) -> None:
    (folder / "cgroup.procs").write_text(str(process.pid))


def _remove(folder: Path) -> None:
    for _ in range(50):
        with contextlib.suppress(OSError):
            return folder.rmdir()
        time.sleep(0.1)  # the last process in it is ending
    folder.rmdir()


def _is_v2() -> bool:
    return (ROOT / "cgroup.controllers").exists()


def _newest_r_workers(count: int) -> list[psutil.Process]:
    """The R-workers that this process started last, in order."""
    children = [each for each in psutil.Process().children() if "r-worker" in each.cmdline()]
    return sorted(children, key=lambda each: each.pid)[-count:]


if __name__ == "__main__":
    main()
