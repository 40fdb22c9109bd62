"""Compare decode throughput with vLLM's CPU build or llama.cpp, each at its best: python benchmarks/beside_vllm.py

All engines compute their prompts once, and then decode in turns (A B A B …); medians are compared. The peers'
environments come from `make_peers.sh`. bfloat16 is compared with bfloat16; int8 weights with an int8 cache are compared
with vLLM's W8A8 and llama.cpp's Q8_0 of the same shape. The checkpoints are kept beside the environments, because vLLM
finds its compiled code by the checkpoint's path. `--prepare` compiles, which takes minutes the first time.
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
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from peer_checkpoints import saved_experts, saved_llama, write_gguf, write_w8a8

PEERS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastdecode" / "peers"
MODELS = PEERS / "models"
"""Random checkpoints of the compared shapes, and the peers' forms of all checkpoints."""

WORKER = Path(__file__).with_name("decode_worker.py")
GIB = 1 << 30

JOINT = ("joint", "jointzen")
"""Peers in environments with both engines, where ours runs vLLM's model code: vLLM alone, and with zentorch."""

INT8 = {"quantization": "int8", "kv_cache_dtype": "int8"}
Rate = Callable[[], float]
"""Tokens per second of one turn."""


class Shape:
    """The sizes of a comparison: number of sequences, prompt tokens of each, and tokens decoded in each turn."""

    def __init__(self, folder: str, rows: int, prompt: int, steps: int, rounds: int) -> None:
        config = json.loads((Path(folder) / "config.json").read_text())
        self.rows, self.prompt, self.steps = rows, prompt, steps
        self.most = steps * (rounds + 1) + 8
        kv_heads = config["num_key_value_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        per_token = 4 * config["num_hidden_layers"] * kv_heads * head_dim
        self.longest = min(4608, config["max_position_embeddings"])
        self.kv_bytes = int(1.1 * per_token * rows * (prompt + self.most + 64)) + GIB // 8

    def __str__(self) -> str:
        return f"{self.rows} sequences of {self.prompt}"


class Worker:
    """An engine in its own process. It computes its prompts, and decodes, while the other engines wait."""

    def __init__(self, python: str, side: str, shape: Shape, settings: dict[str, Any]) -> None:
        # One context length for all comparisons, since vLLM compiles again for another.
        own = {"max_model_len": shape.longest} if side == "vllm" else {"kv_cache_memory": shape.kv_bytes}
        environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
        caches = Path(python).parent.parent / "compiled"
        environment |= {"VLLM_CACHE_ROOT": str(caches), "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor")}
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
        """Wait until all prompts are computed. Raise RuntimeError if the engine has ended."""
        self._answer("READY")

    def rate(self) -> float:
        """Decode for one turn; return tokens per second."""
        assert self._process.stdin
        self._process.stdin.write(f"{self._steps}\n")
        self._process.stdin.flush()
        return float(self._answer("RATE ").split()[1])

    def close(self) -> None:
        """End the engine's process and its child processes."""
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
    """Return the tokens per second of llama.cpp's benchmark of parallel sequences, run in its own process.
    It computes one prompt, and copies the keys and values to the cache of each sequence.
    """
    threads = len(os.sched_getaffinity(0))
    context = shape.rows * (shape.prompt + shape.steps)  # Each sequence has its own cache.
    words = [str(PEERS / "llama" / "bin" / "llama-batched-bench"), "-m", gguf, "-c", str(context), "-b", "2048"]
    words += ["-npp", str(shape.prompt), "-ntg", str(shape.steps), "-npl", str(shape.rows), "-t", str(threads)]
    words += ["-pps", "-fa", "on", "-ctk", cache, "-ctv", cache, "--output-format", "jsonl"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("{") and "speed_tg" in line:
            return float(json.loads(line)["speed_tg"])
    raise RuntimeError("llama.cpp gave no result: " + (done.stderr + done.stdout)[-1500:])


def engines_of(args: argparse.Namespace, plain: str, shape: Shape) -> dict[str, tuple[str, str, Shape, dict[str, Any]]]:
    """Return the arguments of ``Worker`` for each engine by name, for example "int8" and "vllm bfloat16"."""
    ours: dict[str, Any] = {"model": plain, "dtype": "bfloat16", "device": "cpu"}
    of_ours = {"int8": ours | (INT8 if not args.experts else {"quantization": "int8"}), "bfloat16": ours}
    own = ("int8",) if args.peer == "llama" else args.kinds
    engines = {name: (sys.executable, "fastdecode", shape, of_ours[name]) for name in own}
    if args.peer in ("none", "llama"):
        return engines
    python = str(PEERS / args.peer / "bin" / "python")
    theirs = {"dtype": "bfloat16", "enforce_eager": args.eager}
    if args.peer in JOINT:
        same = {"bfloat16": (python, "fastdecode", shape, ours | {"model_impl": "vllm"})}
        return same | {f"{args.peer} bfloat16": (python, "vllm", shape, theirs | {"model": plain})}
    if "bfloat16" in args.kinds:
        engines[f"{args.peer} bfloat16"] = (python, "vllm", shape, theirs | {"model": plain})
    if "int8" in args.kinds and not args.experts:  # On CPUs, vLLM cannot run experts in W8A8.
        w8a8 = write_w8a8(plain, MODELS / f"{Path(plain).name}-w8a8")
        for cache in args.caches or ["auto", "fp8"]:
            settings = theirs | {"model": w8a8, "kv_cache_dtype": cache}
            engines[f"{args.peer} W8A8, cache {cache}"] = (python, "vllm", shape, settings)
    return engines


def ways_of(args: argparse.Namespace, plain: str, shape: Shape, running: ExitStack) -> dict[str, Rate]:
    """Return, by name, functions that decode for one turn and return tokens per second. All engines have started."""
    found: dict[str, Rate] = {}
    for name, words in engines_of(args, plain, shape).items():
        # Engines start one after another: ours measures its first steps, and uses fewer threads on busy cores
        worker = Worker(*words)
        running.callback(worker.close)
        try:
            worker.wait()
            found[name] = worker.rate
        except RuntimeError as error:  # Not every build supports every cache dtype.
            print(f"{name} does not run: {str(error).splitlines()[-1][:200]}", flush=True)
    if args.peer == "llama":
        gguf = write_gguf(plain, MODELS / f"{Path(plain).name}.gguf")
        for cache in args.caches or ["q8_0", "f16"]:
            found[f"llama Q8_0, cache {cache}"] = partial(llama_rate, gguf, shape, cache)
    return found


def compare(args: argparse.Namespace, plain: str, shape: Shape) -> None:
    """Let the engines decode in turns, and print medians, spreads and ratios."""
    with ExitStack() as running:
        ways = ways_of(args, plain, shape, running)
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(args.rounds):
            for name, rate in ways.items():
                rates[name].append(rate())
    medians = {name: statistics.median(each) for name, each in rates.items()}
    for name, each in rates.items():
        print(f"{shape}, {name}: {medians[name]:.0f} tokens/s ({min(each):.0f} to {max(each):.0f})", flush=True)
    quantized = [name for name in ways if name.startswith((f"{args.peer} W8A8", f"{args.peer} Q8_0"))]
    pairs = [("int8", max(quantized, key=medians.__getitem__))] if quantized else []
    pairs += [("bfloat16", f"{args.peer} bfloat16"), ("int8", "bfloat16"), ("int8", f"{args.peer} bfloat16")]
    for ours, other in pairs:
        if ours not in ways or other not in ways:
            continue
        each = [a / b for a, b in zip(rates[ours], rates[other], strict=True)]
        ratio = medians[ours] / medians[other]
        print(f"{shape}, {ours} over {other}: {ratio:.2f} ({min(each):.2f} to {max(each):.2f})", flush=True)


def prepare(args: argparse.Namespace, plain: str, shape: Shape) -> None:
    """Start each vLLM engine once, one after another, so that its compiled code is stored for later starts."""
    for name, words in engines_of(args, plain, shape).items():
        if words[1] != "vllm":
            continue
        start, worker = time.perf_counter(), Worker(*words)
        try:
            worker.wait()
            print(f"{name} is ready after {time.perf_counter() - start:.0f} s", flush=True)
        except RuntimeError as error:
            print(f"{name} does not run: {str(error).splitlines()[-1][:200]}", flush=True)
        finally:
            worker.close()


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--peer",
        default="vllm",
        choices=["vllm", "zen", "llama", *JOINT, "none"],
        help="engine to compare with; none: ours alone (vllm)",
    )
    parser.add_argument("--model", metavar="FOLDER", help="folder with bfloat16 safetensors (random weights)")
    parser.add_argument("--kv-heads", type=int, default=4, help="KV heads of random weights, with 16 heads (4)")
    parser.add_argument("--layers", type=int, default=8, help="layers of random weights (8)")
    parser.add_argument("--experts", action="store_true", help="random layers of Qwen3-30B-A3B in place of a Llama's")
    parser.add_argument("--rows", type=int, help="sequences (64, and at most 32,768 prompt tokens in all)")
    parser.add_argument("--contexts", type=int, nargs="+", default=[256], help="prompt tokens (256)")
    parser.add_argument("--steps", type=int, default=16, help="tokens of each sequence in a turn (16)")
    parser.add_argument("--kinds", nargs="+", default=["int8", "bfloat16"], help="dtypes to compare (int8 bfloat16)")
    parser.add_argument("--caches", nargs="+", default=[], help="the peer's cache dtypes (auto fp8; q8_0 f16)")
    parser.add_argument("--eager", action="store_true", help="vLLM without torch.compile, which takes minutes once")
    parser.add_argument("--prepare", action="store_true", help="let vLLM compile for these flags, and compare nothing")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds (3)")
    return parser.parse_args()


def main() -> None:
    args = parsed()
    MODELS.mkdir(parents=True, exist_ok=True)
    plain = args.model or (
        saved_experts(args.layers, MODELS) if args.experts else saved_llama(args.kv_heads, args.layers, MODELS)
    )
    for context in args.contexts:
        rows = args.rows or min(64, 32768 // context)
        shape = Shape(plain, rows, context, args.steps, args.rounds)
        (prepare if args.prepare else compare)(args, plain, shape)


if __name__ == "__main__":
    main()
