"""Run all targets, one after another, and print a table: ``python fuzz/run.py --runs 1000000``.

Inputs that reach new code are kept in the folder, so that the next run begins with them. The exit status is 1 if a
target failed. Its input is then in the same folder, and ``python fuzz/one.py TARGET FILE`` repeats the failure.
"""

from __future__ import annotations

import argparse
import re
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import parsers
import sessions

SEEDS = parsers.SEEDS | sessions.SEEDS
SHARES = {
    "session": 15,
    "kv-port": 15,
    "answers": 30,
    "hello": 30,
    "lying-stream": 40,
    "gate": 50,
    "stream": 75,
    "report": 110,
}
SHARES |= {"refusal": 90, "welcome": 110, "held": 30, "parking": 45, "chain-file": 5, "join": 50, "plan": 140}
SHARES |= {"header": 100, "weigh": 60, "audit": 60}
SHARES |= {"prompt": 40, "prefill-answers": 40}
"""Thousandths of the inputs; an input of the first is some twenty frames, and takes 500 times as long as a header."""

MEMORY_BYTES = 4 << 30
"""Bytes of address space; a process that wants more fails as on a small machine."""

OPTIONS = ["-rss_limit_mb=1024", "-timeout=3600", "-print_final_stats=1", "-max_len=2048"]
WORDS = [b"null", b"true", b"1e400", b"NaN", b"-1", b"[[", b"{}", b"\\ud800", b'"cores":[', b'"message":"']


@dataclass(frozen=True)
class Outcome:
    """The figures of one target. ``coverage``: branches that ran. ``memory_bytes``: the most that any input needed."""

    target: str
    runs: int
    seconds: float
    coverage: int
    corpus: int
    memory_bytes: int
    rss_mb: int
    status: int

    def row(self) -> str:
        """Return the row of a Markdown table."""
        return (
            f"| {self.target} | {self.runs:,} | {self.seconds:.0f} | {self.coverage} | {self.corpus} | "
            f"{self.memory_bytes / 2**20:.1f} | {self.rss_mb} | {'failed' if self.status else 'none'} |"
        )


def main() -> int:
    """Run all targets and print a row for each. Return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1_000_000, metavar="N", help="inputs over all targets (1000000)")
    parser.add_argument(
        "--folder", type=Path, default=Path("out/fuzz"), help="folder of the inputs that are kept (out/fuzz)"
    )
    parser.add_argument("targets", nargs="*", default=list(SHARES), help="targets to run (all)")
    args = parser.parse_args()
    whole = sum(SHARES[target] for target in args.targets)
    print("| target | inputs | s | branches | kept | most MiB of an input | RSS MB | crashes |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    outcomes = []
    for target in args.targets:
        outcomes.append(run(target, -(-args.runs * SHARES[target] // whole), args.folder.resolve()))
        print(outcomes[-1].row(), flush=True)
    print(f"{sum(outcome.runs for outcome in outcomes):,} inputs")
    return int(any(outcome.status for outcome in outcomes))


def run(target: str, runs: int, folder: Path) -> Outcome:
    """Run one target in its own process."""
    corpus = folder / target
    corpus.mkdir(parents=True, exist_ok=True)
    for index, seed in enumerate(SEEDS[target]):
        (corpus / f"seed-{index}").write_bytes(seed)
    words = folder / "words"
    words.write_text("".join('"' + "".join(f"\\x{byte:02x}" for byte in word) + '"\n' for word in WORDS))
    command = [sys.executable, str(Path(__file__).with_name("one.py")), target, f"-runs={runs}", *OPTIONS]
    command += [f"-dict={words}", f"-artifact_prefix={folder}/{target}-", str(corpus)]
    start = time.monotonic()
    found = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace", preexec_fn=_limit, check=False)
    if found.returncode:
        print(found.stderr[-3000:], file=sys.stderr, flush=True)
    memory = [int(number.replace(",", "")) for number in re.findall(r"memory: ([\d,]+) bytes", found.stderr)]
    return Outcome(
        target,
        _last(r"stat::number_of_executed_units:\s*(\d+)", found.stderr),
        time.monotonic() - start,
        _last(r"cov: (\d+)", found.stderr),
        len(list(corpus.iterdir())),
        max(memory, default=0),
        _last(r"stat::peak_rss_mb:\s*(\d+)", found.stderr),
        found.returncode,
    )


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


def _last(pattern: str, text: str) -> int:
    found = re.findall(pattern, text)
    return int(found[-1]) if found else 0


if __name__ == "__main__":
    sys.exit(main())
