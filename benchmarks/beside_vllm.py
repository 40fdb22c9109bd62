"""Decode throughput beside vLLM's CPU build and llama.cpp, each at its best: python benchmarks/beside_vllm.py

All engines compute their prompts once, and then decode in turns (A B A B …); medians are compared. The peers'
environments come from `make_peers.sh`. bfloat16 is compared with bfloat16; int8 weights and int8 cache with vLLM's
W8A8 and llama.cpp's Q8_0 of the same shape, whose checkpoints are written here.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from models import llama_folder
from peer_checkpoints import write_gguf, write_w8a8

PEERS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastdecode" / "peers"
WORKER = Path(__file__).with_name("decode_worker.py")
GIB = 1 << 30

JOINT = ("joint", "jointzen")
"""Environments with both engines, where ours runs vLLM's model code: with vLLM alone, and with zentorch."""
INT8 = {"quantization": "int8", "kv_cache_dtype": "int8"}
Rate = Callable[[], float]
"""Tokens per second of one turn."""


class Shape:
    """The sequences of a comparison: rows, prompt tokens, and tokens that are decoded in each turn."""

    def __init__(self, folder: str, rows: int, prompt: int, steps: int, rounds: int) -> None:
        config = json.loads((Path(folder) / "config.json").read_text())
        self.rows, self.prompt, self.steps = rows, prompt, steps
        self.most = steps * (rounds + 1) + 8
        kv_heads = config["num_key_value_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        per_token = 4 * config["num_hidden_layers"] * kv_heads * head_dim
        self.kv_bytes = int(1.1 * per_token * rows * (prompt + self.most + 64)) + GIB // 8

    def __str__(self) -> str:
        return f"{self.rows} sequences of {self.prompt}"


class Worker:
    """An engine in a process of its own. It computes its prompts while others do, and decodes alone."""

    def __init__(self, python: str, side: str, shape: Shape, settings: dict[str, Any]) -> None:
        own: dict[str, Any] = {} if side == "vllm" else {"kv_cache_memory": shape.kv_bytes}
        environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
        environment |= {"VLLM_CPU_KVCACHE_SPACE": str(math.ceil(shape.kv_bytes / GIB))}
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))))}
        sizes = map(str, (shape.rows, shape.prompt, shape.most))
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the engine)
        self._steps = shape.steps
        self._process = subprocess.Popen(
            [python, str(WORKER), side, *sizes, json.dumps(settings | own)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=environment,
        )  # fmt: skip

    def wait(self) -> None:
        """Return when all prompts are computed; RuntimeError where the engine ended."""
        self._answer("READY")

    def rate(self) -> float:
        """Return tokens per second of one turn."""
        assert self._process.stdin
        self._process.stdin.write(f"{self._steps}\n")
        self._process.stdin.flush()
        return float(self._answer("RATE ").split()[1])

    def close(self) -> None:
        """End the engine."""
        self._process.kill()
        self._process.wait()
        self._errors.close()

    def _answer(self, word: str) -> str:
        for line in self._process.stdout or ():
            if line.startswith(word):
                return line
        self._errors.seek(0)
        raise RuntimeError("an engine ended: " + self._errors.read()[-1500:])


def llama_rate(gguf: str, shape: Shape, cache: str) -> float:
    """One run of llama.cpp's benchmark of parallel sequences, in a process of its own."""
    threads = len(os.sched_getaffinity(0))
    context = shape.rows * (shape.prompt + shape.steps)
    words = [str(PEERS / "llama" / "bin" / "llama-batched-bench"), "-m", gguf, "-c", str(context), "-b", "2048"]
    words += ["-npp", str(shape.prompt), "-ntg", str(shape.steps), "-npl", str(shape.rows), "-t", str(threads)]
    words += ["-fa", "on", "-ctk", cache, "-ctv", cache, "--output-format", "jsonl"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("{") and "speed_tg" in line:
            return float(json.loads(line)["speed_tg"])
    raise RuntimeError("llama.cpp gave no result: " + (done.stderr + done.stdout)[-1500:])


def ways_of(
    peer: str, plain: str, scratch: Path, shape: Shape, caches: list[str], is_eager: bool, running: ExitStack
) -> dict[str, Rate]:
    """Return ours and the peer's ways by name, each ready to decode.

    ``caches``: dtypes of the peer's cache beside int8 weights.
    """
    python = str(PEERS / peer / "bin" / "python")
    ours: dict[str, Any] = {"model": plain, "dtype": "bfloat16", "device": "cpu"}
    theirs = {"dtype": "bfloat16", "enforce_eager": is_eager}
    engines = {"int8": (sys.executable, "fastdecode", shape, ours | INT8)}
    if peer == "none":
        engines["bfloat16"] = (sys.executable, "fastdecode", shape, ours)
    elif peer in JOINT:
        engines = {"bfloat16": (python, "fastdecode", shape, ours | {"model_impl": "vllm"})}
        engines[f"{peer} bfloat16"] = (python, "vllm", shape, theirs | {"model": plain})
    elif peer != "llama":
        w8a8 = write_w8a8(plain, scratch / "w8a8")
        engines["bfloat16"] = (sys.executable, "fastdecode", shape, ours)
        engines[f"{peer} bfloat16"] = (python, "vllm", shape, theirs | {"model": plain})
        for cache in caches or ["auto", "fp8"]:
            settings = theirs | {"model": w8a8, "kv_cache_dtype": cache}
            engines[f"{peer} W8A8, cache {cache}"] = (python, "vllm", shape, settings)
    found: dict[str, Rate] = {}
    workers = {name: Worker(*words) for name, words in engines.items()}
    for name, worker in workers.items():
        running.callback(worker.close)
        try:
            worker.wait()
            found[name] = worker.rate
        except RuntimeError as error:  # not every build has every cache
            print(f"{name} does not run: {str(error).splitlines()[-1][:200]}", flush=True)
    if peer == "llama":
        gguf = write_gguf(plain, scratch / "model.gguf")
        for cache in caches or ["q8_0", "f16"]:
            found[f"llama Q8_0, cache {cache}"] = partial(llama_rate, gguf, shape, cache)
    return found


def compare(peer: str, plain: str, scratch: Path, shape: Shape, caches: list[str], is_eager: bool, rounds: int) -> None:
    """Print medians, spreads and ratios."""
    with ExitStack() as running:
        ways = ways_of(peer, plain, scratch, shape, caches, is_eager, running)
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, rate in ways.items():
                rates[name].append(rate())
    medians = {name: statistics.median(each) for name, each in rates.items()}
    for name, each in rates.items():
        print(f"{shape}, {name}: {medians[name]:.0f} tokens/s ({min(each):.0f} to {max(each):.0f})", flush=True)
    quantized = [name for name in ways if name.startswith((f"{peer} W8A8", f"{peer} Q8_0"))]
    pairs = [("int8", max(quantized, key=medians.__getitem__))] if quantized else [("int8", "bfloat16")]
    pairs += [("bfloat16", f"{peer} bfloat16"), ("int8", "bfloat16"), ("int8", f"{peer} bfloat16")]
    pairs = [pair for pair in dict.fromkeys(pairs) if all(name in ways for name in pair)]
    for ours, other in pairs:
        each = [a / b for a, b in zip(rates[ours], rates[other], strict=True)]
        ratio = medians[ours] / medians[other]
        print(f"{shape}, {ours} over {other}: {ratio:.2f} ({min(each):.2f} to {max(each):.2f})", flush=True)


def main() -> None:
    """Compare with one peer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--peer", default="vllm", choices=["vllm", "zen", "llama", *JOINT, "none"], help="none: ours alone (vllm)"
    )
    parser.add_argument("--model", metavar="FOLDER", help="bfloat16 safetensors (random weights)")
    parser.add_argument("--kv-heads", type=int, default=4, help="of random weights, of 16 heads (4)")
    parser.add_argument("--layers", type=int, default=8, help="of random weights (8)")
    parser.add_argument("--rows", type=int, default=64, help="sequences (64)")
    parser.add_argument("--contexts", type=int, nargs="+", default=[256], help="prompt tokens (256)")
    parser.add_argument("--steps", type=int, default=16, help="tokens of each sequence in a turn (16)")
    parser.add_argument("--caches", nargs="+", default=[], help="the peer's cache dtypes (auto fp8; q8_0 f16)")
    parser.add_argument("--eager", action="store_true", help="vLLM without torch.compile, which takes a minute")
    parser.add_argument("--rounds", type=int, default=3, help="(3)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        plain = args.model or saved(args.kv_heads, args.layers, Path(scratch) / "plain")
        for context in args.contexts:
            shape = Shape(plain, args.rows, context, args.steps, args.rounds)
            compare(args.peer, plain, Path(scratch), shape, args.caches, args.eager, args.rounds)


def saved(kv_heads: int, layers: int, folder: Path) -> str:
    """A Llama of hidden size 1024 and random weights in bfloat16, as a checkpoint."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(llama_folder(1024, layers, group=16 // kv_heads))
    config.max_position_embeddings = 8192
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


if __name__ == "__main__":
    main()
