"""Does every token stay the same, whatever happens? python benchmarks/repeats.py --kills 200 --preemptions 200

A random four-layer Llama decodes 24 requests, greedy and sampled with seeds, some with n = 4, some that begin alike.
Settings are drawn: dtype of model and cache, prefix caching, one to three mini-batches, chunk size, where prompts
attend, spawned R-workers or such over TCP; by turns sequences are cached once and twice. Each draw runs undisturbed
with one copy, then with R-workers killed by ``kill -9`` at random tokens, then in a cache so small that sequences are
preempted. Exits 1 if any token differs or is lost.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
from collections import Counter
from typing import Any

import numpy as np
from models import llama_folder
from recovery import listening_workers, small_engine

from fastdecode import SamplingParams

DTYPES = [
    ("float32", "auto"), ("bfloat16", "auto"), ("float16", "auto"), ("float32", "bfloat16"), ("float32", "float16"),
    ("bfloat16", "int8"), ("float16", "int8"), ("bfloat16", "int4"), ("float32", "int4"),
]  # fmt: skip
OUTPUT_LEN = 64
SMALL_TOKENS = 1100
"""That the small cache holds: three of the longest sequences, of 48 that want to run."""

Tokens = dict[str, list[tuple[int, ...]]]


def main() -> None:
    """Disturb until both counts are reached; exits 1 at the first token that differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="(200)")
    parser.add_argument("--preemptions", type=int, default=200, help="(200)")
    parser.add_argument("--kv-replicas", default="1,2", metavar="LIST", help="in turn (1,2)")
    parser.add_argument("--seed", type=int, default=1, help="of settings, prompts and kills (1)")
    args = parser.parse_args()
    rng, folder = random.Random(args.seed), llama_folder(256, 4, initializer_range=0.2)
    replicas = [int(each) for each in args.kv_replicas.split(",")]
    done: Counter[str] = Counter()
    while done["kills"] < args.kills or done["preemptions"] < args.preemptions:
        settings = _draw(rng, done["draws"], replicas[done["draws"] % len(replicas)])
        requests = _requests(rng)
        wanted = _run(folder, requests, "spawn:1", settings | {"kv_replicas": 1})[0]
        for _ in range(4):
            killed, kills = _with_kills(folder, requests, settings, rng)
            _compare(wanted, killed, f"{kills} kills", settings)
            done["kills"] += kills
        cramped, preemptions = _run(folder, requests, f"inproc:{settings['kv_replicas']}", settings, small=True)
        _compare(wanted, cramped, f"{preemptions} preemptions", settings)
        done["preemptions"] += preemptions
        done["draws"] += 1
        done["sequences"] += 5 * sum(map(len, wanted.values()))
        print(f"{dict(done)}: {settings}", flush=True)
    print(f"{done['sequences']} sequences, {done['kills']} kills, {done['preemptions']} preemptions: no token differs")


def _draw(rng: random.Random, number: int, kv_replicas: int) -> dict[str, Any]:
    """Settings; every pair of dtypes comes in turn."""
    dtype, kv_cache_dtype = DTYPES[number % len(DTYPES)]
    return {
        "dtype": dtype,
        "kv_cache_dtype": kv_cache_dtype,
        "kv_replicas": kv_replicas,
        "enable_prefix_caching": rng.random() < 0.5,
        "num_mini_batches": rng.randint(1, 3),
        "max_num_batched_tokens": rng.choice([64, 200, 2048]),
        "prefill_scratch": rng.choice([None, "64MiB"]),
    }


def _requests(rng: random.Random) -> list[tuple[list[int], SamplingParams]]:
    tokens = np.random.default_rng(rng.randrange(1 << 30)).integers(0, 4096, (24, 200)).tolist()
    found = []
    for number, prompt in enumerate(tokens):
        begins_alike = tokens[0][:96] if number % 3 == 0 else []
        params = SamplingParams(
            temperature=0.8 * (number % 2),
            seed=number,
            n=4 if number % 8 == 1 else 1,
            max_tokens=OUTPUT_LEN,
            ignore_eos=True,
            detokenize=False,
        )
        found.append(([*begins_alike, *prompt[: rng.randint(1, 200)]], params))
    return found


def _with_kills(folder: str, requests: list, settings: dict[str, Any], rng: random.Random) -> tuple[Tokens, int]:
    """Of three R-workers one or two are killed, each at a random token."""
    moments = sorted(rng.randrange(1, 1500) for _ in range(rng.randint(1, 2)))
    if rng.random() < 0.5:
        with listening_workers() as (spec, processes):
            return _run(folder, requests, spec, settings, moments, processes)[0], len(moments)
    return _run(folder, requests, "spawn:3", settings, moments)[0], len(moments)


def _run(
    folder: str,
    requests: list,
    r_workers: str,
    settings: dict[str, Any],
    kills: list[int] | None = None,
    processes: list[int] | None = None,
    small: bool = False,
) -> tuple[Tokens, int]:
    """Tokens of each request, and preemptions; the R-workers are killed in order once so many tokens are out."""
    moments, found = list(kills or ()), {}
    memory = {"kv_cache_memory": _small_bytes(settings), "schedule": "stall-free"} if small else {}
    sizes = {"max_model_len": 400, "max_num_seqs": 48, "s_threads": 1}
    with small_engine(folder, r_workers, **sizes, **memory, **settings) as engine:
        victims = processes or [worker.link.process.pid for worker in engine.backend.workers if moments]
        for number, (prompt, params) in enumerate(requests):
            engine.add_request(str(number), prompt, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                found[output.request_id] = [each.token_ids for each in output.outputs]
            if moments and sum(len(each) for group in found.values() for each in group) >= moments[0]:
                os.kill(victims[len(moments) - 1], signal.SIGKILL)
                moments.pop(0)
        return found, engine.scheduler.statistics.preemptions


def _small_bytes(settings: dict[str, Any]) -> int:
    """Of SMALL_TOKENS: 4 layers of one KV head of 64 dims, keys and values, with scales."""
    name = settings["dtype"] if settings["kv_cache_dtype"] == "auto" else settings["kv_cache_dtype"]
    row_bytes = {"float32": 256, "float16": 128, "bfloat16": 128, "int8": 68, "int4": 36}[name]
    return SMALL_TOKENS * 4 * 2 * row_bytes


def _compare(wanted: Tokens, found: Tokens, what: str, settings: dict[str, Any]) -> None:
    different = [request for request, tokens in wanted.items() if found.get(request) != tokens]
    if different:
        sys.exit(f"after {what}, requests {', '.join(different)} of {len(wanted)} have other tokens: {settings}")


if __name__ == "__main__":
    main()
