"""Decode with R-workers on Ray against the same R-workers at host:port: python benchmarks/ray_pool.py

The S-worker has the first core, all R-workers the others; both kinds have the same threads, memory, address and an
authenticated connection. A B A B …, each in a job of its own, beside one Ray cluster that is there all the time. The
mark: medians within 3 %. Exits with 1 where they are not.
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

from ray.cluster_utils import Cluster

FASTDECODE = str(Path(sys.executable).with_name("fastdecode"))
ROOT = Path(__file__).resolve().parents[1]
MARK = 0.03
MODEL = f"--model {ROOT}/examples/llama-demo-shape --load-format dummy --skip-tokenizer-init --max-model-len 1024"
OVERRIDES = {"num_hidden_layers": 6, "hidden_size": 512, "num_key_value_heads": 16, "vocab_size": 4096}
WORK = "--num-prompts 16 --random-input-len 256 --random-output-len 160 --num-mini-batches 1 --seed 0"


@contextlib.contextmanager
def ray_cluster(cores: Sequence[int], count: int) -> Iterator[str]:
    """The address of a Ray cluster of one node on ``cores``, which can take ``count`` actors."""
    before = os.sched_getaffinity(0)
    with tempfile.TemporaryDirectory(prefix="fd-", ignore_cleanup_errors=True) as folder:
        os.sched_setaffinity(0, cores)
        os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": folder}
        Path(folder, "ray").mkdir()
        cluster = Cluster()
        try:
            cluster.add_node(num_cpus=count, object_store_memory=80 << 20, include_dashboard=False)
            os.sched_setaffinity(0, before)
            yield cluster.address
        finally:
            cluster.shutdown()


@contextlib.contextmanager
def listening(host: str, cores: Sequence[int], count: int, memory: str, key: Path) -> Iterator[list[str]]:
    """R-workers of one thread each, dealt to ``cores`` as Ray's actors are."""
    flags = ["--threads", "1", "--kv-cache-memory", memory, "--key-file", str(key), "--security", "authenticate"]
    command = [FASTDECODE, "r-worker", "--listen", f"tcp://{host}:0", *flags]
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


def decode_rate(flags: Sequence[str], folder: Path, ray_address: str) -> float:
    """Tokens per second of the decode steps of one job."""
    out = folder / "out.json"
    command = [FASTDECODE, "bench", "throughput", *MODEL.split(), *WORK.split(), "--output-json", str(out)]
    command += ["--hf-overrides", json.dumps(OVERRIDES)]
    done = subprocess.run(
        [*command, "--s-threads", "1", "--security", "authenticate", *flags],
        env={**os.environ, "RAY_ADDRESS": ray_address},
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
    parser.add_argument("--rounds", type=int, default=5, help="of A and B each (5)")
    parser.add_argument("--r-workers", type=int, default=2, help="(2)")
    parser.add_argument("--kv-cache-memory", default="256MiB", help="of each (256MiB)")
    args = parser.parse_args()
    rates: dict[str, list[float]] = {"host:port": [], "ray": []}
    mine, *cores = sorted(os.sched_getaffinity(0))
    if not cores:
        sys.exit("this takes two cores")
    size = (args.r_workers, args.kv_cache_memory)
    with tempfile.TemporaryDirectory() as name, ray_cluster(cores, args.r_workers) as ray:
        folder, key, host = Path(name), Path(name, "key"), ray.rpartition(":")[0]
        key.touch(0o600)
        key.write_text(os.urandom(32).hex())
        for turn in range(args.rounds):
            with listening(host, cores, *size, key) as addresses:
                flags = ["--s-cores", str(mine), "--r-workers", ",".join(addresses), "--key-file", str(key)]
                rates["host:port"].append(decode_rate(flags, folder, ray))
            flags = ["--s-cores", str(mine), "--r-workers", f"ray:{size[0]}", "--r-threads", "1"]
            rates["ray"].append(decode_rate([*flags, "--kv-cache-memory", size[1]], folder, ray))
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
