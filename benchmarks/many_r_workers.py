"""Many R-workers as even as one, in simulation: python benchmarks/many_r_workers.py

The same total R speed in 1, 8, 32 and 128 R-workers and in 8 of speeds 1:2:3:4 twice, under every schedule, with equal
(16 + 1,008 tokens) and mixed lengths (128 + 512, each by up to 80 % more or less); 1,024 seats, R time over S time 1
with all of them taken. Together the R-workers, all of the same memory, hold twice what all seats need at mean full
length, or at the longest for schedules that reserve that; a cached token moves in a millisecond (7B in 16 bits at 0.5
GB/s). Marks: steady tokens per second within 3 % of one R-worker's, the busiest R-worker's time at most 1.05 times the
mean's (1.10 with 128), no preemption. ``sls``, equal lengths: steady mean load at least 0.97 of its limit, peak at most
0.56 of request-level's, steady tokens per second at least 1.18 times as many (1.10 with the presets of the paper's
machine, each schedule with the number of mini-batches that is best for it); mixed: 0.95, and 1.02 times the best other
schedule. Rows that miss a mark say so; exits with 1 then. ``--lengths`` and ``--fleets`` run a piece of it: comparisons
are made where their rows are there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from typing import Any

from simulated import simulated

from fastdecode.scheduler import SCHEDULES

FLEETS = ("1", "8", "32", "128", "1:2:3:4 twice")
LENGTHS = {
    "equal": (1.55e-8, "--random-input-len 16 --random-output-len 1008", (1024, 1024), 8),
    "mixed": (1.77e-8, "--random-input-len 128 --random-output-len 512 --random-range-ratio 0.8", (640, 1152), 12),
}
"""R seconds per token and layer of all R-workers together; the workload, its mean and its longest full length, and its
generations."""

SEATS = 1024
KV_BYTES_PER_TOKEN = 32 * 2 * 4096 * 2
"""Of Llama 7B in 16 bits."""

PRESET = "--model llama-7b --gpu a10 --cpu epyc-7452 --num-r-workers 8 --num-prompts 8192 --max-num-seqs 1024"

Key = tuple[str, str, str]


def flags(lengths: str, fleet: str, schedule: str) -> str:
    """Of ``fastdecode simulate``."""
    seconds, workload, full_lens, generations = LENGTHS[lengths]
    workers = 8 if ":" in fleet else int(fleet)
    speeds = " --r-worker-speeds 1,2,3,4,1,2,3,4" if ":" in fleet else ""
    full_len = full_lens[SCHEDULES[schedule].reserves_longest]
    memory = 2 * SEATS * full_len * KV_BYTES_PER_TOKEN // workers
    return (
        f"--s-part-seconds 4e-3 --num-layers 32 --r-part-seconds-per-token {seconds * workers} "
        f"--model llama-7b --kv-cache-memory {memory} --seconds-per-moved-token 1e-3 "
        f"--num-r-workers {workers} --max-num-seqs {SEATS} --schedule {schedule} "
        f"{workload} --num-prompts {SEATS * generations}{speeds}"
    )


def measure(key: Key) -> dict[str, Any]:
    """Steady figures of one run, with its peak load, preemptions and busiest R-worker."""
    report = simulated(flags(*key))
    return {**report["steady"], "peak": report["kv_load"]["peak_tokens"], "preemptions": report["preemptions"]}


def misses(key: Key, figures: dict[str, Any], alone: dict[str, Any] | None) -> Iterator[str]:
    """What an R-worker among many lacks beside one alone."""
    if alone and figures["tokens_per_second"] < 0.97 * alone["tokens_per_second"]:
        yield "below 0.97 of one R-worker's"
    if figures["imbalance"] > (1.10 if key[1] == "128" else 1.05):
        yield "uneven"
    if figures["preemptions"]:
        yield f"{figures['preemptions']} preemptions"


def against_others(lengths: str, found: dict[Key, dict[str, Any]]) -> Iterator[str]:
    """``sls`` beside its limit and the other schedules, with one and with eight R-workers."""
    marks = {"equal": (0.97, 1.18), "mixed": (0.95, 1.02)}[lengths]
    for fleet in ("1", "8"):
        if (lengths, fleet, "sls") not in found:
            continue
        own = found[lengths, fleet, "sls"]
        waves = found[lengths, fleet, "request-level"]
        others = [found[lengths, fleet, name]["tokens_per_second"] for name in SCHEDULES if name != "sls"]
        rival = waves["tokens_per_second"] if lengths == "equal" else max(others)
        load = own["mean_kv_tokens"] / own["limit_kv_tokens"]
        gain = own["tokens_per_second"] / rival
        peak = own["peak"] / waves["peak"]
        missed = load < marks[0] or gain < marks[1] or (lengths == "equal" and peak > 0.56)
        yield (
            f"sls, {lengths}, {fleet} R-worker(s): load {load:.3f} of its limit, peak {peak:.3f} of waves', "
            f"{gain:.3f} times {'their speed' if lengths == 'equal' else 'the best other'}"
            f"{' | MISSED' if missed else ''}"
        )


def presets() -> Iterator[str]:
    """The paper's machine. With two mini-batches a step near R = S waits for the way to R-workers and back, with three
    the S-worker loads the weights once more: each schedule at the number that is best for it."""
    machine = f"{PRESET} --random-input-len 16 --random-output-len 1008"
    found = {}
    for schedule, number in product(("sls", "request-level"), (2, 3)):
        report = simulated(f"{machine} --num-mini-batches {number} --schedule {schedule}")
        found[schedule, number] = report["steady"]["tokens_per_second"]
        yield f"paper's machine, {schedule}, {number} mini-batches: {found[schedule, number]:.0f} steady tokens/s"
    own, waves = (max(found[schedule, number] for number in (2, 3)) for schedule in ("sls", "request-level"))
    yield f"paper's machine, each at its best: {own / waves:.3f} times{'' if own >= 1.10 * waves else ' | MISSED'}"


def main() -> None:
    """Print all rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2, help="(2)")
    parser.add_argument("--lengths", default=",".join(LENGTHS), help="(equal,mixed)")
    parser.add_argument("--fleets", default=",".join(FLEETS), help=f"({','.join(FLEETS)})")
    parser.add_argument("--presets", action=argparse.BooleanOptionalAction, default=True, help="the paper's machine")
    args = parser.parse_args()
    lengths, fleets = args.lengths.split(","), args.fleets.split(",")
    keys = [(each, fleet, schedule) for each in lengths for schedule in SCHEDULES for fleet in fleets]
    found: dict[Key, dict[str, Any]] = {}
    missed = False
    print("lengths | schedule | R-workers | steady tokens/s | busiest over mean | mean load | peak load | preemptions")
    with ProcessPoolExecutor(args.processes) as pool:
        for key, figures in zip(keys, pool.map(measure, keys), strict=True):
            found[key] = figures
            wrong = ", ".join(misses(key, figures, found.get((key[0], "1", key[2]))))
            missed |= bool(wrong)
            print(
                f"{key[0]} | {key[2]} | {key[1]} | {figures['tokens_per_second']:.0f} | {figures['imbalance']:.3f} | "
                f"{figures['mean_kv_tokens']:.0f} | {figures['peak']} | {figures['preemptions']}"
                f"{' | MISSED: ' + wrong if wrong else ''}",
                flush=True,
            )
    lines = [line for each in lengths for line in against_others(each, found)]
    for line in (*lines, *(presets() if args.presets else ())):
        missed |= "MISSED" in line
        print(line, flush=True)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
