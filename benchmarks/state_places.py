"""A hybrid's decode steps with its states on R-workers and with the S-worker, in turns: ms of a step and what it is of.

The model of hybrid_prompts.py, narrower, with 32 heads: 8 layers of which 2 attend, 13 MB of states for a sequence. An
R-worker in a process with a core of its own, over shared memory or TCP, or in this process.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import numpy as np
from hybrid_prompts import SIZES
from transformers import Qwen3NextConfig

from fastdecode import LLM, SamplingParams
from fastdecode.core.metrics import StepRecord

LAYERS = {
    "hidden_size": 512, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256, "num_hidden_layers": 8,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2, "linear_num_value_heads": 32,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--r-workers", default="spawn:1", help="inproc, spawn:1 or tcp")
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        Qwen3NextConfig(**SIZES | LAYERS).save_pretrained(folder)
        llms = {side: stack.enter_context(make_llm(folder, side, args, stack)) for side in ("r", "s")}
        for count in args.num_seqs:
            seconds = {side: [] for side in llms}
            for _ in range(args.repeats):
                for side, llm in llms.items():
                    seconds[side].append(step_of(llm, count, args))
            print(f"{args.r_workers}, {count} sequences: {report(seconds)}", flush=True)


def make_llm(folder: str, side: str, args: argparse.Namespace, stack: contextlib.ExitStack) -> LLM:
    os.sched_setaffinity(0, range(os.cpu_count() or 1))  # an engine before this one has bound this process
    settings = {"kv_cache_memory": "1GiB", "r_threads": 1}
    if args.r_workers == "inproc":
        places = {"r_workers": "inproc", "s_threads": 1}
    elif args.r_workers == "tcp":
        places = {
            "r_workers": stack.enter_context(listening()),
            "s_cores": "0",
            "kv_cache_memory": None,
            "r_threads": None,
        }
    else:
        places = {"r_workers": args.r_workers, "s_cores": "0", "r_cores": "1"}
    return LLM(
        folder, load_format="dummy", skip_tokenizer_init=True, device="cpu", dtype="float32", max_num_seqs=16,
        max_model_len=1024, enable_prefix_caching=False, state_on=side,
        num_mini_batches=1 if args.r_workers == "inproc" else 2, **settings | places,
    )  # fmt: skip


@contextlib.contextmanager
def listening() -> Iterator[str]:
    """An R-worker on core 1; its address."""
    command = [sys.executable, "-m", "fastdecode.cli.main", "r-worker", "--listen", "tcp://127.0.0.1:0", "--cores", "1"]
    process = subprocess.Popen([*command, "--kv-cache-memory", "1GiB"], stdout=subprocess.PIPE, text=True)
    try:
        yield process.stdout.readline().split("tcp://")[1].split()[0]
    finally:
        process.terminate()
        process.wait()


def step_of(llm: LLM, count: int, args: argparse.Namespace) -> tuple[float, float, float]:
    """Median seconds of a decode step of ``count`` sequences, of the S-worker's model, and of the busiest R-worker."""
    records: list[StepRecord] = []
    llm.engine.on_step = records.append
    rng = np.random.default_rng(0)
    prompts = [{"prompt_token_ids": rng.integers(8, 4000, args.input_len).tolist()} for _ in range(count)]
    params = SamplingParams(temperature=0, max_tokens=args.output_len, ignore_eos=True, detokenize=False)
    llm.generate(prompts, params, use_tqdm=False)
    decodes = [each for each in records if each.is_decode and each.num_tokens == count]
    found = [(each.wall_seconds, each.s_seconds, max(each.r_seconds)) for each in decodes]
    return tuple(np.median(found, axis=0).tolist())


def report(seconds: dict[str, list[tuple[float, float, float]]]) -> str:
    """Medians and ranges of each side, and their ratio."""
    parts = []
    for side, found in seconds.items():
        wall, s, r = np.array(found).T * 1e3
        of = f"S {np.median(s):.2f}, R {np.median(r):.2f}"
        parts.append(f"{side} {np.median(wall):.2f} ms ({wall.min():.2f}-{wall.max():.2f}; {of})")
    walls = [np.median([each[0] for each in found]) for found in seconds.values()]
    return ", ".join(parts) + f", r over s {walls[0] / walls[1]:.2f}"


if __name__ == "__main__":
    main()
