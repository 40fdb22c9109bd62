"""Measure the time to first token of a session's next turn: history on disk, in memory, or recomputed.

python benchmarks/parked_sessions.py [--sessions 1024:200 16384:6] [--r-workers spawn:1]

A first engine, with its own R-workers, answers each session, and parks all of them when it ends. A second engine, with
new R-workers, answers the next turn of some sessions: first from the disk, then once more from memory. A text of the
same length with another beginning stands for a history that is recomputed. The three cases take turns, so that a slower
machine affects all of them. Then `fastdecode cache ls` and `verify` are timed over all files. The model is the demo
model with longer positions, in float32. The files may still be in the page cache, as the first engine left them.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from fastdecode import LLM, SamplingParams
from fastdecode.cli.main import main as run_command
from fastdecode.core.parked import ParkPlace

FIRST_TOKEN = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
ANSWER = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)


def make_llm(args: argparse.Namespace, folder: str, num_tokens: int) -> LLM:
    return LLM(
        r_workers=args.r_workers,
        park_dir=folder,
        park_after=args.park_after,
        kv_cache_memory=args.kv_cache_memory,
        max_model_len=num_tokens + 64,
        hf_overrides={"max_position_embeddings": num_tokens + 64},
        skip_tokenizer_init=True,
    )


def histories(num_tokens: int, count: int) -> list[list[int]]:
    draw = random.Random(num_tokens)
    return [[draw.randrange(256) for _ in range(num_tokens - 16)] for _ in range(count)]


def first_token(llm: LLM, prompt: list[int]) -> tuple[float, int]:
    start = time.perf_counter()
    [output] = llm.generate([{"prompt_token_ids": prompt}], FIRST_TOKEN, use_tqdm=False)
    return time.perf_counter() - start, output.outputs[0].token_ids[0]


def answer(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    """Return the prompts, each followed by its answer."""
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], ANSWER, use_tqdm=False)
    return [[*prompt, *output.outputs[0].token_ids] for prompt, output in zip(prompts, outputs, strict=True)]


def measure(args: argparse.Namespace, num_tokens: int, count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        with make_llm(args, folder, num_tokens) as llm:
            start = time.perf_counter()
            sessions = answer(llm, histories(num_tokens, count))
            answered = time.perf_counter() - start
            chosen = random.Random(0).sample(sessions, min(count, args.measured))
            nexts = [{"prompt_token_ids": [*prompt, 7]} for prompt in chosen]
            undisturbed = [each.outputs[0].token_ids[0] for each in llm.generate(nexts, FIRST_TOKEN, use_tqdm=False)]
            start_of_end = time.perf_counter()
        parked = time.perf_counter() - start_of_end
        start = time.perf_counter()
        with make_llm(args, folder, num_tokens) as llm:
            started = time.perf_counter() - start
            first_token(llm, [1] * 40)
            listed = time.perf_counter() - start - started
            counts = llm.engine.scheduler.store.parked.counts
            rows: list[tuple[float, ...]] = []
            for prompt, expected in zip(chosen, undisturbed, strict=True):
                disk, token = first_token(llm, [*prompt, 7])
                memory, again = first_token(llm, [*prompt, 7])
                computed, _ = first_token(llm, [255 - prompt[0], *prompt[1:], 7])
                if not token == again == expected:
                    raise SystemExit("a session's tokens from disk, from memory and of the first engine differ")
                rows.append((disk, memory, computed))
            if (counts.num_woken, counts.num_failed) != (len(rows), 0):
                raise SystemExit(f"not all of {len(rows)} sessions were loaded: {counts}")
            on_disk = sum(llm.engine.parking.parked_bytes.values()) if llm.engine.parking else 0
        report(num_tokens, count, rows, on_disk, f"answered in {answered:.1f} s, parked the last in {parked:.1f} s")
        print(f"  start {started:.2f} s, first step of all (in which R-workers list what they have) {listed:.2f} s")
        look_at_files(folder)


def look_at_files(folder: str) -> None:
    """Time `fastdecode cache ls` and `verify` over all files, without the start of Python."""
    for action in ("ls", "verify"):
        start, said = time.perf_counter(), io.StringIO()
        with contextlib.redirect_stdout(said):
            codes = [run_command(["cache", action, str(each)]) for each in sorted(Path(folder).iterdir())]
        print(f"  cache {action:<7} {time.perf_counter() - start:.2f} s, exit {max(codes)}")


def report(num_tokens: int, count: int, rows: list[tuple[float, ...]], on_disk: int, text: str) -> None:
    print(f"{count} sessions of {num_tokens} tokens, {text}; {len(rows)} went on, {on_disk / 1e6:.0f} MB on disk")
    for name, seconds in zip(("disk", "memory", "computed"), zip(*rows, strict=True), strict=True):
        ms = sorted(1e3 * each for each in seconds)
        print(f"  {name:<9} {statistics.median(ms):8.1f} ms ({ms[0]:.1f}–{ms[-1]:.1f})")
    for name, ratios in (
        ("disk / memory", [disk / memory for disk, memory, _ in rows]),
        ("disk / computed", [disk / computed for disk, _, computed in rows]),
    ):
        print(f"  {name:<16} {statistics.median(ratios):.3f} ({min(ratios):.3f}–{max(ratios):.3f})", flush=True)


def main(arguments: list[str] | None = None) -> Any:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--sessions",
        nargs="+",
        default=["1024:200", "16384:6"],
        metavar="TOKENS:COUNT",
        help="lengths and numbers of sessions (1024:200 16384:6)",
    )
    parser.add_argument("--r-workers", default="spawn:1", help="R-workers, as for an engine (spawn:1)")
    parser.add_argument("--kv-cache-memory", default="800MiB", help="KV cache of each R-worker (800MiB)")
    parser.add_argument(
        "--measured", type=int, default=30, help="sessions that continue, for each place of the history (30)"
    )
    parser.add_argument(
        "--park-after", type=float, default=ParkPlace.after_seconds, help="seconds until a prefix is parked (60)"
    )
    args = parser.parse_args(arguments)
    for each in args.sessions:
        num_tokens, count = map(int, each.split(":"))
        measure(args, num_tokens, count)


if __name__ == "__main__":
    main()
