"""How soon does an abort stop a chain? python benchmarks/prefill_abort.py --rounds 20

One prompt at a time goes through a chain of prefill workers, each with a core of its own, and is aborted at a random
moment. Printed: the time of one layer on each worker (of whole prompts, in the same run); the time from
``abort_request`` until no worker computes any more, also in layers, and how many layers' attention began after it; and
how long ``abort_request`` took, after which the R-worker must hold no block.

The workers are real processes; what they run is wrapped so that they print when the attention of each layer begins and
when a prompt ends.
"""

from __future__ import annotations

import argparse
import itertools
import json
import queue
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from models import llama_folder

from fastdecode import LLM, SamplingParams
from fastdecode.remote_prefill import PrefillPart

WATCHED = """
import json, sys, time
import fastdecode.prefill_worker as worker
from fastdecode.cli.main import main
compute = worker.compute_part
def tell(kind):
    print(json.dumps([kind, time.perf_counter()]), flush=True)
def watched(model, layout, token_ids, start, samples, exchange):
    def told(layer, k, v):
        gathered = exchange(layer, k, v)
        tell(layer)
        return gathered
    try:
        return compute(model, layout, token_ids, start, samples, told)
    finally:
        tell("end")
worker.compute_part = watched
sys.exit(main(sys.argv[1:]))
"""
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)


class EvenChain:
    """A policy: every prompt goes through all workers, in equal parts."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers

    def begin_step(self, now_seconds: float, num_waiting: int = 0, num_decoding: int = 0) -> None:
        """See ``PrefillPolicy``."""

    def assign(self, num_tokens: int) -> tuple[PrefillPart, ...]:
        """See ``PrefillPolicy``."""
        bounds = [num_tokens * i // self._num_workers for i in range(self._num_workers + 1)]
        return tuple(PrefillPart(i, bounds[i], bounds[i + 1]) for i in range(self._num_workers))

    started = ended = joined = lost = lambda self, *told, **more: None


class Watched:
    """A prefill worker that prints what it does; ``moments`` has, of one prompt, when layers began and it ended."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.address = process.stdout.readline().split("tcp://")[1].split()[0]
        threading.Thread(target=self._read, args=(process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        for line in process.stdout:
            self._lines.put(line)

    def moments(self, patience_seconds: float) -> tuple[list[float], float | None]:
        """When each layer of the next prompt began, and when that ended; None where none began in time."""
        began: list[float] = []
        while True:
            try:
                kind, moment = json.loads(self._lines.get(timeout=patience_seconds))
            except queue.Empty:
                return began, None
            if kind == "end":
                return began, moment
            began.append(moment)
            patience_seconds = 60.0  # it has begun, and so will end


@contextmanager
def watched(flags: list[str], core: int) -> Iterator[Watched]:
    """A process on ``core``."""
    command = [sys.executable, "-c", WATCHED, "prefill-worker", "--listen", "tcp://127.0.0.1:0", *flags]
    process = subprocess.Popen([*command, "--threads", "1", "--cores", str(core)], stdout=subprocess.PIPE, text=True)
    try:
        yield Watched(process)
    finally:
        process.kill()
        process.wait()


@dataclass(frozen=True)
class Abort:
    """Seconds from ``abort_request`` to the end of the last computation, of the call itself, and layers begun later."""

    seconds: float
    call_seconds: float
    num_later: int


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="aborted prompts (20)")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="of the chain (2)")
    parser.add_argument("--prompt-len", type=int, default=4000, metavar="TOKENS", help="(4000)")
    parser.add_argument("--hidden", type=int, default=1024, metavar="N", help="(1024)")
    parser.add_argument("--layers", type=int, default=8, metavar="N", help="(8)")
    parser.add_argument("--dtype", default="float32", help="(float32)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(0)")
    args = parser.parse_args()
    model = ["--model", llama_folder(args.hidden, args.layers), "--load-format", "dummy", "--dtype", args.dtype]
    model += ["--device", "cpu", "--max-model-len", str(args.prompt_len + 64)]
    with ExitStack() as stack:
        workers = [stack.enter_context(watched(model, core)) for core in range(args.workers)]
        llm = stack.enter_context(
            LLM(
                model[1], load_format="dummy", dtype=args.dtype, device="cpu", skip_tokenizer_init=True, s_threads=1,
                max_model_len=args.prompt_len + 64, kv_cache_memory="1GiB", enable_prefix_caching=False,
                prefill_workers=",".join(worker.address for worker in workers),
            )
        )  # fmt: skip
        llm.engine.scheduler.remote_prompts.policy = EvenChain(args.workers)
        report(llm, workers, args)


def report(llm: LLM, workers: list[Watched], args: argparse.Namespace) -> None:
    """Whole prompts first, the second of which counts; then those that are aborted."""
    draws = random.Random(args.seed)
    for _ in range(2):
        start = time.perf_counter()
        add(llm, draws, args.prompt_len)
        while llm.engine.has_unfinished_requests():
            llm.engine.step()
        whole = time.perf_counter() - start
        layers = [layer_seconds(*worker.moments(60.0)) for worker in workers]
    print(f"whole prompt {whole:.2f} s; a layer takes {', '.join(f'{each * 1e3:.0f}' for each in layers)} ms")
    aborts = [abort_one(llm, workers, draws, args.prompt_len, whole) for _ in range(args.rounds)]
    seconds = sorted(each.seconds for each in aborts)
    median, most, layer = statistics.median(seconds), seconds[-1], max(layers)
    print(f"abort_request to the last computation's end: median {median * 1e3:.1f} ms, most {most * 1e3:.1f} ms: "
          f"{median / layer:.2f} and {most / layer:.2f} layers")  # fmt: skip
    print(f"layers whose attention began later: {sum(each.num_later for each in aborts)} in {len(aborts)} aborts of "
          f"{args.workers} workers")  # fmt: skip
    calls = sorted(each.call_seconds for each in aborts)
    print(f"abort_request, after which no block is held: median {statistics.median(calls) * 1e3:.2f} ms, "
          f"most {calls[-1] * 1e3:.2f} ms")  # fmt: skip


def layer_seconds(began: list[float], end: float | None) -> float:
    """The median time between the beginnings of two layers."""
    return statistics.median(after - before for before, after in itertools.pairwise(began))


def add(llm: LLM, draws: random.Random, prompt_len: int) -> None:
    llm.engine.add_request("prompt", [draws.randrange(500) for _ in range(prompt_len)], ONE_TOKEN)


def abort_one(llm: LLM, workers: list[Watched], draws: random.Random, prompt_len: int, whole: float) -> Abort:
    """Abort a prompt at a random moment, in the first nine tenths of its time."""
    moment = draws.uniform(0.05, 0.9) * whole
    add(llm, draws, prompt_len)
    start = time.perf_counter()
    while time.perf_counter() < start + moment:
        llm.engine.step()
    asked = time.perf_counter()
    llm.engine.abort_request("prompt")
    called = time.perf_counter()
    if llm.engine.backend.blocks_used:
        raise SystemExit("the R-worker holds blocks of an aborted prompt")
    found = [worker.moments(1.0) for worker in workers]
    ends = [end for _, end in found if end is not None]
    num_later = sum(began > asked for worker, _ in found for began in worker)
    return Abort(max(0.0, max(ends) - asked), called - asked, num_later)


if __name__ == "__main__":
    main()
