"""``python -m chaos --rounds 300``: runs random rounds, one process each; the exit status is 1 if any round failed."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from chaos.configuration import KINDS, SMALL, Configuration, draw

FAULTS = ("exception", "tokens", "sources", "audit", "blocks", "negative-free", "lost-count", "left", "hang")
COUNTS = (
    "kills", "drains", "joins", "preemptions", "woken", "not woken", "sequences", "tokens", "audited rounds",
    "audited", "different", "ties", "missed",
)  # fmt: skip
ROUND_SECONDS = 240


def main() -> int:
    options = _options()
    import fastdecode.engine  # noqa: F401  the children need not load torch

    first = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    unclean: dict[int, str] = {}
    totals, kinds = Counter[str](), Counter[str]()
    end = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as folder:
        try:
            for seed in range(first, first + options.rounds):
                if time.monotonic() > end:
                    break
                drawn = draw(seed, options.kinds, options.small)
                counts, faults = _run(drawn, Path(folder), options)
                totals.update(counts)
                kinds[drawn.kind] += 1
                if faults:
                    unclean[seed] = faults[0].split(":")[0]
        except KeyboardInterrupt:
            print("interrupted; of the rounds until then:")
    _print_totals(unclean, totals, kinds)
    return 1 if unclean else 0


def _run(drawn: Configuration, folder: Path, options: argparse.Namespace) -> tuple[Counter[str], list[str]]:
    """Run and print a round; return the events that occurred, and its faults."""
    start = time.monotonic()
    result = _in_child(drawn, folder)
    faults = [fault for fault in result["faults"] if fault.split(":")[0] not in options.ignore]
    counts = Counter[str](result["counts"])
    print(f"seed {drawn.seed}: {'UNCLEAN' if faults else 'clean'}, {time.monotonic() - start:.1f} s, "
          f"{counts['steps']} steps, {counts['events']} events, {drawn}", flush=True)  # fmt: skip
    if faults or options.verbose:
        print("\n".join(["  " + line for line in (result["settings"], *result["log"], *faults)]), flush=True)
    return counts, faults


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, help="of the first round; the next ones follow (default: drawn)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no further round begins")
    parser.add_argument("--kinds", nargs="+", default=tuple(KINDS), choices=KINDS, help="of rounds (default: all)")
    parser.add_argument("--small", action="store_true", help="short rounds without processes that import torch")
    parser.add_argument("--ignore", nargs="*", default=[], choices=FAULTS, help="faults that do not count")
    parser.add_argument("--verbose", action="store_true", help="print what befell clean rounds, too")
    options = parser.parse_args()
    if options.small:
        options.kinds = SMALL
    return options


def _print_totals(unclean: dict[int, str], totals: Counter[str], kinds: Counter[str]) -> None:
    """Print the totals of all rounds.
    ``missed``: events that never found a target. ``different``: tokens that differ from the reference's. ``ties``:
    completions that chose the other of two equal tokens.
    """
    num_rounds = kinds.total()
    print(f"{num_rounds} rounds ({', '.join(f'{kinds[kind]} {kind}' for kind in KINDS if kinds[kind])})")
    print(", ".join(f"{totals[name]} {name}" for name in COUNTS))
    found = ", ".join(f"{seed} ({kind})" for seed, kind in unclean.items())
    print(f"{num_rounds - len(unclean)} clean, {len(unclean)} unclean{': ' * bool(unclean)}{found}")


def _in_child(drawn: Configuration, folder: Path) -> dict[str, Any]:
    """Return the result of a round, run in its own process, which is killed with its children after ROUND_SECONDS."""
    path = folder / "result.json"
    path.unlink(missing_ok=True)
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        _run_and_exit(drawn, folder, path)
    deadline = time.monotonic() + ROUND_SECONDS
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            _end(child)
            os.waitpid(child, 0)
            trace = (folder / "hang.txt").read_text() if (folder / "hang.txt").exists() else ""
            return _no_result(f"hang: no end after {ROUND_SECONDS} s\n{trace}")
        time.sleep(0.02)
    return json.loads(path.read_text()) if path.exists() else _no_result("exception: the round's process died")


def _no_result(fault: str) -> dict[str, Any]:
    return {"faults": [fault], "log": [], "counts": {}, "settings": ""}


def _end(child: int) -> None:
    import psutil

    for process in psutil.Process(child).children(recursive=True):
        process.kill()
    os.kill(child, signal.SIGKILL)


def _run_and_exit(drawn: Configuration, folder: Path, path: Path) -> None:
    """Run a round in the child process and exit; never return."""
    status = 1
    try:
        from chaos.jobs import run_round, write

        log = (folder / "log.txt").open("w")
        os.dup2(log.fileno(), 2)
        with (folder / "hang.txt").open("w") as hang:
            faulthandler.dump_traceback_later(ROUND_SECONDS - 5, file=hang)
            write(run_round(drawn, folder), path)
        faulthandler.cancel_dump_traceback_later()
        status = 0
    except BaseException:
        path.write_text(json.dumps(_no_result(f"exception: {traceback.format_exc()}")))
    finally:
        os._exit(status)


if __name__ == "__main__":
    raise SystemExit(main())
