"""Decode with R-workers on Ray against the same R-workers at host:port: python benchmarks/ray_pool.py

Both take the same cores, threads, memory, loopback addresses and an authenticated connection; A B A B …, each in a job
of its own. The mark: medians within 3 %. Exits with 1 where they are not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

FASTDECODE = str(Path(sys.executable).with_name("fastdecode"))
ROOT = Path(__file__).resolve().parents[1]
MARK = 0.03
MODEL = f"--model {ROOT}/examples/llama-demo-shape --load-format dummy --skip-tokenizer-init --max-model-len 1024"
WORK = "--num-prompts 32 --random-input-len 128 --random-output-len 96 --num-mini-batches 1 --seed 0"


@contextlib.contextmanager
def listening(count: int, memory: str, key: Path) -> Iterator[list[str]]:
    """R-workers of one thread each, on cores 0, 1, … as Ray's actors take them."""
    flags = ["--threads", "1", "--kv-cache-memory", memory, "--key-file", str(key), "--security", "authenticate"]
    command = [FASTDECODE, "r-worker", "--listen", "tcp://127.0.0.1:0", *flags]
    cores = sorted(os.sched_getaffinity(0))
    started = [
        subprocess.Popen([*command, "--cores", str(cores[i % len(cores)])], stdout=subprocess.PIPE, text=True)
        for i in range(count)
    ]
    try:
        yield [each.stdout.readline().split("tcp://")[1].split()[0] for each in started if each.stdout]
    finally:
        for each in started:
            each.kill()
            each.communicate()


def decode_rate(flags: Sequence[str], folder: Path) -> float:
    """Tokens per second of the decode steps of one job."""
    out = folder / "out.json"
    command = [FASTDECODE, "bench", "throughput", *MODEL.split(), *WORK.split(), "--output-json", str(out)]
    done = subprocess.run(
        [*command, "--s-threads", "1", *flags],
        env={**os.environ, "RAY_ADDRESS": "local"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{' '.join(flags)}: {done.stderr.strip()}")
    return float(json.loads(out.read_text())["decode"]["tokens_per_second"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="of A and B each (3)")
    parser.add_argument("--r-workers", type=int, default=2, help="(2)")
    parser.add_argument("--kv-cache-memory", default="256MiB", help="of each (256MiB)")
    args = parser.parse_args()
    rates: dict[str, list[float]] = {"host:port": [], "ray": []}
    with tempfile.TemporaryDirectory() as name:
        folder, key = Path(name), Path(name, "key")
        key.touch(0o600)
        key.write_text(os.urandom(32).hex())
        for turn in range(args.rounds):
            with listening(args.r_workers, args.kv_cache_memory, key) as addresses:
                flags = ["--r-workers", ",".join(addresses), "--key-file", str(key), "--security", "authenticate"]
                rates["host:port"].append(decode_rate(flags, folder))
            flags = ["--r-workers", f"ray:{args.r_workers}", "--r-threads", "1", "--security", "authenticate"]
            rates["ray"].append(decode_rate([*flags, "--kv-cache-memory", args.kv_cache_memory], folder))
            print(
                f"{turn}: " + ", ".join(f"{kind} {each[-1]:.1f} tokens/s" for kind, each in rates.items()), flush=True
            )
    medians = {kind: statistics.median(each) for kind, each in rates.items()}
    ratio = medians["ray"] / medians["host:port"]
    print(", ".join(f"{kind}: median {medians[kind]:.1f} ({min(e):.1f}–{max(e):.1f})" for kind, e in rates.items()))
    print(f"ray / host:port: {ratio:.3f}" + ("" if abs(ratio - 1) <= MARK else f", MISSES {MARK:.0%}"))
    return int(abs(ratio - 1) > MARK)


if __name__ == "__main__":
    sys.exit(main())
