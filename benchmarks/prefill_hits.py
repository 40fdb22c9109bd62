"""How soon is the first token of a prompt half of which is cached? python benchmarks/prefill_hits.py --repeats 3

The model of ``bench prefill`` (8 layers, hidden 1024). The prompt goes on from a cached prefix: on the S-worker, on one
prefill worker, and on a chain of two, in the parts that the engine chooses; one core each. Then on an S-worker with
both cores, and R-workers that share them. Printed: medians of the time to the first token, with least and most, and
what travelled.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import numpy as np

from fastdecode import LLM, SamplingParams
from fastdecode.protocols import PrefillPolicy
from fastdecode.remote_prefill import Prefilled, PrefillPart

FIRST = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
ALONE = {"s_threads": 1, "r_threads": 1, "s_cores": "0", "r_cores": "0"}
WORKERS = {"prefill_workers": "spawn:2", "prefill_cores": "0,1", "prefill_threads": 1}
BOTH = {"s_threads": 2, "r_threads": 2, "s_cores": "0,1", "r_cores": "0,1"}


class Fixed:
    """A policy: every prompt on prefill worker 0, or on the S-worker."""

    def __init__(self, on_worker: bool) -> None:
        self._on_worker = on_worker

    def assign(self, num_tokens: int, context_len: int = 0) -> tuple[PrefillPart, ...]:
        """See ``PrefillPolicy``."""
        return (PrefillPart(0, context_len, context_len + num_tokens),) if self._on_worker else ()

    begin_step = started = ended = joined = lost = lambda self, *told, **more: None


class Run:
    """An engine, and prompts of random tokens on it."""

    def __init__(self, args: argparse.Namespace, **settings: Any) -> None:
        self._args, self._rng = args, np.random.default_rng(0)
        self.llm = LLM(
            "examples/llama-demo-shape",
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=args.dtype,
            hf_overrides={"max_position_embeddings": 2 * args.prompt_len},
            max_model_len=args.prompt_len + 16,
            max_num_batched_tokens=512,
            num_mini_batches=1,
            **settings,
        )
        self.policy = self.llm.engine.scheduler.remote_prompts.policy
        self.seen: list[Prefilled] = []
        if self.llm.engine.prefills:
            self.llm.engine.prefills.on_prefilled = self.seen.append

    def seconds(self, policy: PrefillPolicy | None) -> float:
        """Of the prompt's arrival to its first token, its prefix being cached."""
        engine, args = self.llm.engine, self._args
        prompt = self._rng.integers(0, 1000, args.prompt_len).tolist()
        engine.reset_prefix_cache()
        engine.scheduler.remote_prompts.policy = self.policy
        self.llm.generate([{"prompt_token_ids": prompt[: args.hit_len]}], FIRST, use_tqdm=False)
        engine.scheduler.remote_prompts.policy = policy
        before = engine.scheduler.statistics.prefix_hit_tokens
        (output,) = self.llm.generate([{"prompt_token_ids": prompt}], FIRST, use_tqdm=False)
        assert engine.scheduler.statistics.prefix_hit_tokens - before == args.hit_len
        return output.metrics.token_seconds[0] - output.metrics.arrival_seconds


def main() -> None:
    """Print a row per way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-len", type=int, default=4096, metavar="TOKENS", help="(4096)")
    parser.add_argument("--hit-len", type=int, default=2048, metavar="TOKENS", help="whole blocks of it (2048)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="of each way, in turns (3)")
    parser.add_argument("--dtype", default="float32", help="(float32)")
    args = parser.parse_args()
    run = Run(args, **ALONE, **WORKERS)
    ways = {"S-worker, one core": Fixed(False), "one prefill worker": Fixed(True), "the engine's choice": run.policy}
    found: dict[str, list[float]] = {way: [] for way in ways}
    with run.llm:
        for _ in range(args.repeats):
            for way, policy in ways.items():
                found[way].append(run.seconds(policy))
        last = run.seen[-1]
        parts = [part.end - part.start for part in run.policy.assign(args.prompt_len - args.hit_len, args.hit_len)]
    with (both := Run(args, **BOTH)).llm:
        found["S-worker, both cores"] = [both.seconds(None) for _ in range(args.repeats)]
    base = statistics.median(found["S-worker, one core"])
    for way, seconds in found.items():
        median = statistics.median(seconds)
        print(f"{way:22} {median:.2f} s ({min(seconds):.2f}–{max(seconds):.2f}), {median / base:.3f} of one core's")
    megabytes = (f"{count / 1e6:.1f}" for count in (last.read_bytes, last.sent_bytes, last.stored_bytes))
    print("parts {}; MB read, sent on and stored: {}".format(parts, ", ".join(megabytes)))


if __name__ == "__main__":
    main()
