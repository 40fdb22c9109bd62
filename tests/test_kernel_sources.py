"""Code that the kernels' sources must not have, whatever compilers make of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

KERNELS = sorted((Path(__file__).parents[1] / "rworker_cpp/src/kernels").glob("*.[hc]pp"))
VECTOR = re.compile(
    r"\b([LS]::(?!width|accumulators|float_rows|code_rows|code_chunk|pack|lane_bytes|pair_dot|packs_factors)|_mm\d*_|__m\d+|vec\b|ivec\b|widen|narrow)"
)


def vector_choices(source: str) -> list[str]:
    """Return conditional expressions of which a branch is a vector; a mask, or a branch around the loop, is right.

    g++ 12 at -O3 made a lane mask of such a condition, and one lane of sixteen was computed.
    """
    code = re.sub(r"//[^\n]*|/\*.*?\*/|\"[^\"\n]*\"", "", source, flags=re.DOTALL)
    branches = re.findall(r"\?([^;{}]*)", code)
    return [" ".join(branch.split()) for branch in branches if VECTOR.search(re.split(r"\)\s*,|;", branch)[0])]


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.name)
def test_no_scalar_condition_chooses_between_vectors(path: Path) -> None:
    assert vector_choices(path.read_text()) == []


@pytest.mark.parametrize(
    "fault",
    [
        "L::to_int(empty ? L::set1(0.0f) : L::div(above, L::set1(scale)))",
        "L::store(output, first ? part\n  : L::fma(part, weight, kept));",
        "const __m512 x = first ? a : _mm512_set1_ps(1.0f);",
        "return dtype == DType::float16 ? L::load_half(half) : L::load_bfloat(half);",
    ],
)
def test_the_rule_finds_what_was_wrong_once(fault: str) -> None:
    assert vector_choices(fault)
    assert not vector_choices("// " + fault.replace("\n", " "))
