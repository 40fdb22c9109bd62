"""Do prompts computed by a prefill worker disturb those who decode? python benchmarks/disaggregation.py

32 sequences decode on core 0 (S-worker and R-worker in turn) while prompts of 2,000 tokens arrive one after another.
Four ways, in turns within one run: no prompts at all; none, while an unrelated process multiplies matrices on core 1,
which shows what two cores of this machine take from each other; prompts that a prefill worker on core 1 computes;
prompts that the S-worker computes between the decodes, within its token budget (stall-free). Printed for each: the time
between tokens of those who decode, P50 and P99, and their tokens per second, beside those without prompts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fastdecode import LLM, SamplingParams
from fastdecode.core.remote_prefill import PrefillPart

DECODING, DECODE_PROMPT = 32, 64
WAYS = ("none", "neighbour", "prefill-worker", "s-worker")
NEIGHBOUR = """
import os, torch
os.sched_setaffinity(0, [1])
torch.set_num_threads(1)
a, b = (torch.randn(1024, 1024, dtype=torch.bfloat16) for _ in "ab")
while True:
    torch.mm(a, b)
"""


@dataclass(frozen=True)
class AllOrNothing:
    """A policy: every prompt of at least ``least`` tokens goes to prefill worker 0."""

    least: float

    def begin_step(self, now_seconds: float, num_waiting: int = 0, num_decoding: int = 0) -> None:
        """See ``PrefillPolicy``."""

    def assign(self, num_tokens: int, context_len: int = 0) -> tuple[PrefillPart, ...]:
        """See ``PrefillPolicy``."""
        return (PrefillPart(0, context_len, context_len + num_tokens),) if num_tokens >= self.least else ()

    started = ended = joined = lost = lambda self, *told, **more: None


def main() -> None:
    """Print a row per way and round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="(2)")
    parser.add_argument("--seconds", type=float, default=12.0, metavar="S", help="of each way in each round (12)")
    parser.add_argument("--prompt-len", type=int, default=2000, metavar="TOKENS", help="(2000)")
    parser.add_argument("--layers", type=int, default=8, metavar="N", help="(8)")
    parser.add_argument("--dtype", default="bfloat16", help="(bfloat16)")
    args = parser.parse_args()
    llm = LLM(
        "examples/llama-demo-shape",
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=args.dtype,
        hf_overrides={"num_hidden_layers": args.layers},
        max_model_len=4096,
        max_num_seqs=DECODING + 8,
        max_num_batched_tokens=512,
        enable_prefix_caching=False,
        schedule="stall-free",
        s_cores="0",
        r_cores="0",
        s_threads=1,
        r_threads=1,
        num_mini_batches=1,
        prefill_workers="spawn:1",
        prefill_cores="1",
        prefill_threads=1,
    )
    with llm:
        found: dict[str, list[tuple[float, float, float, int]]] = {way: [] for way in WAYS}
        for _ in range(args.rounds):
            for way in WAYS:
                with neighbour() if way == "neighbour" else contextlib.nullcontext():
                    found[way].append(run(llm, way, args.seconds, args.prompt_len))
                print(f"{way:15} p50 {1e3 * found[way][-1][0]:.1f} ms, p99 {1e3 * found[way][-1][1]:.1f} ms, "
                      f"{found[way][-1][2]:.0f} tokens/s, {found[way][-1][3]} prompts", flush=True)  # fmt: skip
        for way in WAYS[1:]:
            ratios = [
                [mine / base for mine, base in zip(one[:3], other[:3], strict=True)]
                for one, other in zip(found[way], found["none"], strict=True)
            ]
            p50, p99, rate = (statistics.median(column) for column in zip(*ratios, strict=True))
            print(json.dumps({"way": way, "p50": round(p50, 3), "p99": round(p99, 3), "tokens_per_s": round(rate, 3)}))


@contextlib.contextmanager
def neighbour() -> Iterator[None]:
    """A process that uses all of core 1."""
    process = subprocess.Popen([sys.executable, "-c", NEIGHBOUR])
    time.sleep(5)  # until it has imported torch
    try:
        yield
    finally:
        process.kill()
        process.wait()


def run(llm: LLM, way: str, seconds: float, prompt_len: int) -> tuple[float, float, float, int]:
    """P50 and P99 of the time between tokens, tokens per second of those who decode, and prompts that ended."""
    engine, rng = llm.engine, np.random.default_rng(0)
    engine.scheduler.remote_prompts.policy = AllOrNothing(prompt_len if way == "prefill-worker" else float("inf"))
    endless = SamplingParams(temperature=0, max_tokens=3900, ignore_eos=True, detokenize=False)
    one_token = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    for number in range(DECODING):
        engine.add_request(f"d{number}", rng.integers(0, 1000, DECODE_PROMPT).tolist(), endless)
    while any(len(r.token_seconds) < 8 for r in engine.in_flight._requests.values()):
        engine.step()
    start, steps, prompts, under_way = time.perf_counter(), [], 0, False
    while (now := time.perf_counter()) < start + seconds:
        if way in WAYS[2:] and not under_way:
            engine.add_request(f"p{prompts}", rng.integers(0, 1000, prompt_len).tolist(), one_token)
            under_way = True
        outputs = engine.step()
        if any(output.request_id.startswith("d") for output in outputs):
            steps.append(time.perf_counter())
        for output in outputs:
            if output.request_id.startswith("p") and output.finished:
                prompts, under_way = prompts + 1, False
    gaps = np.diff(steps)
    engine.abort_request([f"d{number}" for number in range(DECODING)] + [f"p{prompts}"])
    engine.look_around()
    return float(np.median(gaps)), float(np.quantile(gaps, 0.99)), DECODING * len(steps) / (now - start), prompts


if __name__ == "__main__":
    main()
