"""Compare the cost of the inner loops of NEON's products with those of AVX-512.

A table has instructions per KV byte, counted in the assembly that g++ makes, and KV bytes per cycle of a Neoverse V2,
computed by llvm-mca.

    python scripts/inner_loops.py [--mca llvm-mca-19]

Needs g++ and g++-aarch64-linux-gnu. The second column needs an llvm-mca that knows Neoverse V2 (17 or later). A round
of a loop is its shortest path from its products back to them that prefetches as many cache lines as it reads.
"""

from __future__ import annotations

import argparse
import heapq
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[1] / "rworker_cpp"
KERNEL_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-w", "-S")
WIDE_FLAGS = "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c -mavx512vnni -mavx512bf16"
NEON_FLAGS = "-march=armv8.2-a+dotprod+bf16+i8mm+fp16fml"
DTYPES = {"float16": 1, "bfloat16": 2}  # numbers of the C++ enum
BRANCH = re.compile(r"^(?:b|b\.?\w\w|cbn?z|tbn?z|j\w+)\s(?:.*,\s*)?(\.L\w+)$")
ALWAYS = re.compile(r"^(?:b|jmp)\s")
ASK = re.compile(r"^(?:prfm|prefetch)")
CACHE_LINE = 64


@dataclass(frozen=True)
class Kernels:
    """The source files of one instruction set's products by dtype, with a pattern for the product instruction."""

    compiler: str
    flags: str
    lanes: int
    sources: dict[str, tuple[str, str]]


NEON = Kernels(
    "aarch64-linux-gnu-g++", NEON_FLAGS, 4,
    {"float16": ("neon_bf16.cpp", r"^(fmlal2?|fmla)\s"), "bfloat16": ("neon_bf16.cpp", r"^bfdot\s")},
)  # fmt: skip
WIDE = Kernels(
    "g++", WIDE_FLAGS, 16,
    {"float16": ("avx512.cpp", r"^vfmadd\w+ps\s"), "bfloat16": ("avx512_bf16.cpp", r"^vdpbf16ps\s")},
)  # fmt: skip


def functions(assembly: str) -> dict[str, list[str]]:
    """Return the labels and instructions of each function, by its demangled name."""
    found: dict[str, list[str]] = {}
    body: list[str] = []
    for line in assembly.splitlines():
        start = re.match(r"^(_Z[\w.]+):", line)
        if start:
            body = found[start[1]] = []
        elif re.match(r"^(\.L\w+:|\t[a-z])", line):
            body.append(re.sub(r"\s+", " ", re.split(r"//|\t#", line)[0]).strip())
    names = subprocess.run(["c++filt"], input="\n".join(found), capture_output=True, text=True, check=True).stdout
    return dict(zip(names.splitlines(), found.values(), strict=True))


def ways(body: Sequence[str]) -> Iterator[list[int]]:
    """Yield, for each line of a function, the lines that may run next."""
    labels = {line[:-1]: number for number, line in enumerate(body) if line.endswith(":")}
    for number, line in enumerate(body):
        branch = BRANCH.match(line)
        after = [] if ALWAYS.match(line) or line.startswith("ret") else [number + 1]
        after += [labels[branch[1]]] if branch and branch[1] in labels else []
        yield [each for each in after if each < len(body)]


def round_of(body: Sequence[str], product: str, asks: int) -> list[str]:
    """Return the instructions of a round of the loop with most products: the shortest with ``asks`` prefetches."""
    following = list(ways(body))
    wanted = re.compile(product)
    runs: dict[int, int] = {}  # products per basic block, by its first line
    start = 0
    for number, line in enumerate(body):
        if line.endswith(":") or BRANCH.match(line):
            start = number + 1
        runs[start] = runs.get(start, 0) + bool(wanted.match(line))
    first = max(runs, key=lambda line: runs[line])
    queue = [(0, first, 0, (first,))]
    seen: set[tuple[int, int]] = set()
    while queue:
        length, line, asked, path = heapq.heappop(queue)
        for after in following[line]:
            count = min(asks, asked + bool(ASK.match(body[after])))
            if after == first and count == asks:
                return [body[each] for each in path if not body[each].endswith(":")]
            if (after, count) not in seen:
                seen.add((after, count))
                step = not body[after].endswith(":")
                heapq.heappush(queue, (length + step, after, count, (*path, after)))
    raise SystemExit("inner_loops: found no loop with so many prefetches")


def compiled(kernels: Kernels, source: str, folder: Path) -> dict[str, list[str]]:
    out = folder / f"{source}.s"
    include = [f"-I{SOURCES / part}" for part in ("include", "src")]
    command = [kernels.compiler, *KERNEL_FLAGS, *kernels.flags.split(), *include, str(SOURCES / "src/kernels" / source)]
    subprocess.run([*command, "-o", str(out)], check=True)
    return functions(out.read_text())


def loop_of(kernels: Kernels, bodies: dict[str, list[str]], dtype: str, loop: str, rows: int) -> tuple[list[str], int]:
    """Return the instructions of a round of the loop for ``rows`` rows, and the KV bytes that it reads.
    If several loops match, the one that reads most vectors counts. Short rounds are doubled to a whole cache line.
    """
    name = re.compile(rf"{loop}<.*?\(rworker::DType\){DTYPES[dtype]}, {rows}, (\d+)>")
    vectors, body = max((int(found[1]), body) for full, body in bodies.items() if (found := name.search(full)))
    read = vectors * kernels.lanes * (4 if dtype == "bfloat16" else 2)
    product = kernels.sources[dtype][1]
    if read < CACHE_LINE:  # every other round prefetches a line
        return round_of(body, product, 0) + round_of(body, product, 1), CACHE_LINE
    return round_of(body, product, read // CACHE_LINE), read


def cycles(mca: str, loop: Sequence[str]) -> float | None:
    """Return the cycles of one round on Neoverse V2, if all reads hit the first-level cache."""
    text = "\n".join(line for line in loop if not BRANCH.match(line))
    done = subprocess.run(
        [mca, "-mtriple=aarch64", "-mcpu=neoverse-v2", "-iterations=100"],
        input=text, capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = re.search(r"^Total Cycles: +(\d+)", done.stdout, re.MULTILINE)
    return int(found[1]) / 100 if found else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mca", default="llvm-mca", help="program of llvm-mca (%(default)s)")
    parser.add_argument("--show", action="store_true", help="each round of NEON, too")
    options = parser.parse_args()
    print("| loop | rows | instructions per KV byte, NEON | AVX-512 | ratio | KV bytes per cycle, NEON |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        made = {
            source: compiled(kernels, source, Path(folder))
            for kernels in (NEON, WIDE) for source in {source for source, _ in kernels.sources.values()}
        }  # fmt: skip
    for dtype in ("bfloat16", "float16"):
        for loop in ("score_tiles", "add_values"):
            for rows in (1, 2, 4):
                row, per_byte = [], []
                for kernels in (NEON, WIDE):
                    bodies = made[kernels.sources[dtype][0]]
                    instructions, read = loop_of(kernels, bodies, dtype, loop, rows)
                    per_byte.append(len(instructions) / read)
                    if kernels is NEON:
                        took = cycles(options.mca, instructions)
                        row = ["" if took is None else f"{read / took:.1f}"]
                        shown = instructions
                print(f"| {dtype} {loop} | {rows} | {per_byte[0]:.2f} | {per_byte[1]:.2f} | "
                      f"{per_byte[0] / per_byte[1]:.1f} | {row[0]} |")  # fmt: skip
                if options.show:
                    print("\n".join(f"    {line}" for line in shown))


if __name__ == "__main__":
    main()
