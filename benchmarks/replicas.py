"""What does a lost R-worker cost with two copies of each sequence, and what do they? python benchmarks/replicas.py

Greedy sequences decode on three R-workers. One is killed with ``kill -9`` (or stopped, with ``--silence``) at a random
token in the middle of a step; once every sequence decodes and has its second copy again, another one. For each loss:
the longest time between two tokens of any sequence until the next loss, beyond a normal step; cached tokens computed
again; and seconds until every sequence decodes with as many copies as there are to be. Every token must be that of an
undisturbed run with one copy. ``--kv-replicas 1``: the same where each sequence is cached once.

    python benchmarks/replicas.py --throughput --rounds 40

Decode with two copies against one, without losses: two engines that are open at once take turns, A B A B …, at
``--context`` tokens, over caches filled with random keys and values. Marks: 0.25 s with ``kill -9``, 1.7 s with
silence, 0 tokens computed again, 0.93 of the throughput. Exits 1 if any token differs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from models import llama_folder
from recovery import run_requests, small_engine, three_workers

from fastdecode import SamplingParams
from fastdecode.api.outputs import RequestOutput
from fastdecode.core.metrics import StepRecord
from fastdecode.engine import LLMEngine
from fastdecode.measure.decode_rig import RandomPrompts

GAP_MARK, SILENT_GAP_MARK, RATE_MARK = 0.25, 1.7, 0.93
STEPS = 8
"""Of each engine in a round."""

STEPS_BETWEEN = 10
"""From when all is as before a loss to the next loss."""


@dataclass
class Loss:
    """R-worker ``victim`` was lost: seconds of ``time.perf_counter``, and rows from then until the next loss."""

    victim: int
    normal_step: float
    struck: float = 0.0
    noticed: float = 0.0
    whole: float = 0.0
    num_repeated: int = 0
    num_recomputed: int = 0
    gap: float = 0.0

    def __str__(self) -> str:
        return (
            f"R-worker {self.victim}: gap {self.gap:.3f} s beyond a step of {self.normal_step:.3f} s, noticed after "
            f"{self.noticed - self.struck:.3f} s, {self.num_repeated} rows repeated, {self.num_recomputed} tokens "
            f"computed again, whole after {self.whole - self.struck:.2f} s"
        )


@dataclass
class Losses:
    """Has R-workers ``victims`` lost one after the other, the first after the ``moment``-th output token."""

    engine: LLMEngine
    processes: list[int]
    victims: list[int]
    moment: int
    is_silent: bool
    found: list[Loss] = field(default_factory=list)
    _steps: list[float] = field(default_factory=list)
    _num_tokens: int = 0
    _steps_whole: int = 0

    def watch(self, record: StepRecord) -> None:
        """After each step."""
        self._num_tokens += record.num_output_tokens
        if record.is_decode:
            self._steps.append(record.wall_seconds)
        if self.found:
            self._note(self.found[-1], record)
        due = self._num_tokens >= self.moment if not self.found else self._steps_whole >= STEPS_BETWEEN
        if due and len(self.found) < len(self.victims):
            self._strike()

    def _strike(self) -> None:
        loss = Loss(self.victims[len(self.found)], statistics.median(self._steps[-50:]))
        self.found.append(loss)
        self._steps_whole = 0
        kind = signal.SIGSTOP if self.is_silent else signal.SIGKILL

        def strike() -> None:
            loss.struck = time.perf_counter()
            os.kill(self.processes[loss.victim], kind)

        threading.Timer(random.random() * loss.normal_step, strike).start()

    def _note(self, loss: Loss, record: StepRecord) -> None:
        unsampled = record.num_tokens - record.num_output_tokens
        is_gone = loss.victim not in self.engine.scheduler.snapshot().present
        if is_gone and not loss.noticed:
            loss.noticed, loss.num_repeated = time.perf_counter(), unsampled
        else:
            loss.num_recomputed += unsampled
        if is_gone and not unsampled and self._has_all_copies():
            loss.whole = loss.whole or time.perf_counter()
            self._steps_whole += 1

    def _has_all_copies(self) -> bool:
        """Every sequence decodes, on as many R-workers as it is to be cached on."""
        scheduler = self.engine.scheduler
        if scheduler.snapshot().prompts or scheduler.snapshot().num_waiting:
            return False
        alone, _ = scheduler.snapshot().num_copies
        return self.engine.config.kv_replicas == 1 or len(scheduler.snapshot().present) == 1 or alone == 0

    def measure_gaps(self, outputs: list[RequestOutput]) -> None:
        """The longest time between two tokens that ends after each loss and before the next."""
        ends = [*[loss.struck for loss in self.found[1:]], np.inf]
        pairs = [pair for output in outputs for pair in pairwise(output.metrics.token_seconds)]
        for loss, end in zip(self.found, ends, strict=True):
            gaps = (after - before for before, after in pairs if loss.struck < after <= end)
            loss.gap = max(gaps, default=0.0) - loss.normal_step


def main() -> None:
    """Measure the cost of losses, or of copies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kv-replicas", type=int, default=2, help="(2)")
    parser.add_argument("--transport", choices=["spawn", "tcp"], default="spawn", help="(spawn)")
    parser.add_argument("--silence", action="store_true", help="SIGSTOP in place of SIGKILL")
    parser.add_argument("--runs", type=int, default=5, help="of two losses each (5)")
    parser.add_argument("--sequences", type=int, help="(32; 64 with --throughput)")
    parser.add_argument("--prompt-len", type=int, default=512, help="(512)")
    parser.add_argument("--output-len", type=int, default=400, help="(400)")
    parser.add_argument("--seed", type=int, default=3, help="of prompts and losses (3)")
    parser.add_argument("--dtypes", default="bfloat16,float32", metavar="LIST", help="(bfloat16,float32)")
    parser.add_argument("--throughput", action="store_true", help="without losses, two copies against one")
    parser.add_argument("--rounds", type=int, default=40, help="of A and B each (40)")
    parser.add_argument("--context", type=int, default=1024, help="(1024)")
    parser.add_argument("--r-workers", default="spawn:2", help="with --throughput (spawn:2)")
    parser.add_argument("--shape", default="512,4,1", help="with --throughput: hidden size, layers, heads per KV head")
    args = parser.parse_args()
    args.sequences = args.sequences or (64 if args.throughput else 32)
    for dtype in args.dtypes.split(","):
        if args.throughput:
            _compare_rates(args, dtype)
        else:
            _lose(args, dtype)


def _lose(args: argparse.Namespace, dtype: str) -> None:
    folder, rng = llama_folder(256, 4, initializer_range=0.2), random.Random(args.seed)
    prompts = np.random.default_rng(args.seed).integers(0, 4096, (args.sequences, args.prompt_len)).tolist()
    params = SamplingParams(temperature=0, max_tokens=args.output_len, ignore_eos=True, detokenize=False)
    with small_engine(folder, "spawn:3", dtype=dtype) as engine:
        wanted = [output.outputs[0].token_ids for output in run_requests(engine, prompts, params)]
    print(f"{dtype}, undisturbed: at least {min(len(set(each)) for each in wanted)} different tokens in a sequence")
    found: list[Loss] = []
    different = 0
    for _ in range(args.runs):
        moment = rng.randrange(args.sequences * 10, args.sequences * args.output_len // 8)
        with contextlib.ExitStack() as stack:
            spec, processes = stack.enter_context(three_workers(args.transport))
            engine = stack.enter_context(small_engine(folder, spec, dtype=dtype, kv_replicas=args.kv_replicas))
            processes = processes or [worker.link.process.pid for worker in engine.backend.workers]
            losses = Losses(engine, processes, rng.sample(range(3), 2), moment, args.silence)
            engine.on_step = losses.watch
            outputs = run_requests(engine, prompts, params)
        if not all(loss.whole for loss in losses.found) or len(losses.found) < 2:
            sys.exit("the sequences ended before all of them had their second copies again: raise --output-len")
        losses.measure_gaps(outputs)
        mine = [output.outputs[0].token_ids for output in outputs]
        different += sum(one != other for one, other in zip(wanted, mine, strict=True))
        found += losses.found
        for number, loss in enumerate(losses.found, 1):
            print(f"{dtype}, loss {number}, {loss}", flush=True)
    _summarise(args, dtype, found, different)
    if different:
        sys.exit(1)


def _summarise(args: argparse.Namespace, dtype: str, found: list[Loss], different: int) -> None:
    gaps = [loss.gap for loss in found]
    mark = (SILENT_GAP_MARK if args.silence else GAP_MARK) if args.kv_replicas == 2 else np.inf
    whole = [loss.whole - loss.struck for loss in found[::2]]
    how = "silence" if args.silence else "kill -9"
    print(
        f"{dtype}, kv_replicas {args.kv_replicas}, {args.transport}, {how}: {len(found)} losses; longest gap beyond a "
        f"step: median {statistics.median(gaps):.3f} s, most {max(gaps):.3f} s"
        f"{'' if max(gaps) <= mark else f' (MISSES {mark})'}; computed again: "
        f"{sum(loss.num_recomputed for loss in found)} tokens; whole after the first loss of a run in "
        f"{statistics.median(whole):.2f} s (median), {max(whole):.2f} s (most); {different} of "
        f"{args.runs * args.sequences} sequences differ",
        flush=True,
    )


def _compare_rates(args: argparse.Namespace, dtype: str) -> None:
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(_full_engine(args, dtype, copies)) for copies in (1, 2)]
        blocks = [[_decode(engine) for engine in engines] for _ in range(args.rounds + 1)][1:]  # one to warm up
    rates = np.array([[_rate(records) for records in pair] for pair in blocks])
    ratios = rates[:, 1] / rates[:, 0]
    ratio = float(np.median(ratios))
    low, high = np.percentile(ratios, (10, 90))
    for copies in (1, 2):
        records = [record for pair in blocks for record in pair[copies - 1]]
        print(f"{dtype}, copies {copies}: {np.median(rates[:, copies - 1]):.0f} tokens/s, {_parts(records)}")
    print(
        f"{dtype}, {args.r_workers}, {args.sequences} sequences at {args.context} tokens, shape {args.shape}: two "
        f"copies / one: {ratio:.3f} (median of {args.rounds} pairs; p10 {low:.3f}, p90 {high:.3f})"
        f"{'' if ratio >= RATE_MARK else f', MISSES {RATE_MARK}'}",
        flush=True,
    )


@contextlib.contextmanager
def _full_engine(args: argparse.Namespace, dtype: str, kv_replicas: int) -> Iterator[LLMEngine]:
    """One whose sequences decode; they reach ``--context`` in the middle of what is measured."""
    hidden, layers, group = map(int, args.shape.split(","))
    num_steps = (args.rounds + 2) * STEPS
    num_tokens = args.sequences * (args.context + num_steps)
    settings = {
        "dtype": dtype,
        "schedule": "prefill-first",
        "enable_prefix_caching": False,
        "kv_replicas": kv_replicas,
        "kv_cache_memory": num_tokens * layers * hidden // group * 2 * (2 if dtype == "bfloat16" else 4),
        "max_num_seqs": args.sequences,
        "prefill_scratch": "8GiB",  # prompts are only stored, not attended
    }
    params = SamplingParams(temperature=0, max_tokens=num_steps, ignore_eos=True, detokenize=False)
    with small_engine(llama_folder(hidden, layers, group=group), args.r_workers, **settings) as engine:
        for number in range(args.sequences):
            engine.add_request(str(number), [1] * (args.context - num_steps // 2), params)
        with engine.world.computed_by(RandomPrompts):
            while engine.scheduler.snapshot().prompts or engine.scheduler.snapshot().num_waiting:
                engine.step()
        yield engine
        engine.abort_request(map(str, range(args.sequences)))


def _decode(engine: LLMEngine) -> list[StepRecord]:
    """The next STEPS steps but the first, for which R-workers wake up."""
    records: list[StepRecord] = []
    engine.on_step = records.append
    engine.world.clock.restart()
    for _ in range(STEPS):
        engine.step()
    return records[1:]


def _rate(records: list[StepRecord]) -> float:
    """Tokens per second."""
    return sum(record.num_output_tokens for record in records) / sum(record.wall_seconds for record in records)


def _parts(records: list[StepRecord]) -> str:
    """Medians of what a step takes."""
    names = ("wall", "s", "wait", "host")
    parts = [f"{name} {statistics.median(getattr(each, name + '_seconds') for each in records):.4f}" for name in names]
    uneven = statistics.mean(max(each.kv_loads) / np.mean(each.kv_loads) for each in records)
    r_seconds = statistics.median(max(each.r_seconds) for each in records)
    return f"seconds of a step: {', '.join(parts)}, busiest R-worker {r_seconds:.4f}; KV loads {uneven:.4f} of the mean"


if __name__ == "__main__":
    main()
