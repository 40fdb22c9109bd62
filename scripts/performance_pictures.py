"""Draw docs/kernels.png and docs/end_to_end.png from the ledger's tables: python scripts/performance_pictures.py"""

from __future__ import annotations

import json
import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

DOCS = Path(__file__).parent.parent / "docs"
OURS, THEIRS, GRID = "#3f51b5", "#b0b4c8", "#d8dae2"


def main() -> None:
    draw_kernels(table("Beside vLLM's kernel"))
    draw_end_to_end(table("int8 beside vLLM's W8A8 on Zen 4"))


def table(title: str) -> list[list[str]]:
    """Return the rows of the table in the ledger's entry with this title, without the heading."""
    topics = json.loads((DOCS / "ledger" / "measured.json").read_text("utf-8"))["topics"]
    entry = next(entry for topic in topics for entry in topic["entries"] if entry["title"] == title)
    lines = [line for line in entry["text"] if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def numbers(cell: str) -> list[float]:
    """Return the numbers in a cell. A comma before three digits separates thousands."""
    return [float(each.replace(",", "")) for each in re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", cell)]


def draw_kernels(rows: list[list[str]]) -> None:
    """Draw bars of GB/s with two threads: FastDecode's kernels beside vLLM's."""
    ours, theirs = ([numbers(row[column])[1] for row in rows] for column in (1, 2))
    figure, axes = plt.subplots(figsize=(9, 4.6), dpi=110)
    places = range(len(rows))
    axes.barh([place - 0.2 for place in places], ours, 0.38, color=OURS, label="FastDecode's R-worker")
    axes.barh([place + 0.2 for place in places], theirs, 0.38, color=THEIRS, label="vLLM 0.32, CPU build")
    for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        axes.text(one + 0.4, place - 0.2, f"{one / other:.1f} ×", va="center", fontsize=9)
    axes.set_yticks(places, [shape_name(row[0]) for row in rows], fontsize=9)
    axes.set_xlabel("GB/s of KV cache read by decode attention, two threads, Zen 4")
    finish(figure, axes, "kernels.png")


def shape_name(cell: str) -> str:
    """Return a label for a row such as "bfloat16 32 / 8, 64, 1,024": query and KV heads, batch, context."""
    dtype, rest = cell.split(" ", 1)
    heads, batch, context = rest.split(", ")
    counts = f"{batch.removeprefix('batch ')} × {context.removeprefix('context ')}"
    return f"{dtype}, {heads.replace(' heads', '')} heads, {counts}"


def draw_end_to_end(rows: list[list[str]]) -> None:
    """Draw bars of decode tokens/s divided by vLLM's."""
    ratios = [numbers(row[3])[0] for row in rows]
    figure, axes = plt.subplots(figsize=(9, 3.2), dpi=110)
    axes.barh(range(len(rows)), ratios, 0.6, color=[OURS if ratio >= 1 else THEIRS for ratio in ratios])
    axes.axvline(1, color="#444444", linewidth=1)
    for place, ratio in enumerate(ratios):
        axes.text(
            ratio + 0.01,
            place,
            f"{ratio:.2f} ×",
            va="center",
            fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )
    axes.set_yticks(range(len(rows)), [row[0].replace("kv ", "KV heads ") for row in rows], fontsize=9)
    axes.set_xlabel("decode tokens/s, int8, over vLLM 0.32's W8A8 (CPU build), one machine of two cores, Zen 4")
    finish(figure, axes, "end_to_end.png")


def finish(figure: plt.Figure, axes: plt.Axes, name: str) -> None:
    """Put the first row on top, remove the frame, and write the file."""
    axes.invert_yaxis()
    axes.grid(axis="x", color=GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="lower right")
    figure.tight_layout()
    figure.savefig(DOCS / name)


if __name__ == "__main__":
    main()
