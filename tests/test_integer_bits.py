"""Logits of int8 have one hash for all numbers of ranks, instruction sets, rows and threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import model_zoo
from helpers.forks import relayed
from helpers.ports import free_port

from fastdecode import _sworker

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "helpers" / "integer_logits.py"
MODELS = ("llama-gqa", "qwen3_moe")
AVX2 = {"FASTDECODE_ISA": "avx2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
PLAIN: dict[str, str] = {}


def lines_of(folders: list[Path], ranks: list[dict[str, str]]) -> list[str]:
    """Return the hashes that rank 0 prints; ``ranks``: each rank's environment, which sets instruction sets."""
    port = str(free_port())
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONPATH": str(SCRIPT.parents[1])}
    words = [str(len(ranks)), port, *map(str, folders)]
    started = [sys.executable, str(SCRIPT)]
    # A rank without an instruction set of its own may be a fork, which saves the imports
    forked = relayed([sys.executable, "-c", "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')"])
    running = [
        subprocess.Popen(
            [*(started if each else [*forked, str(SCRIPT)]), str(index), *words],
            env=environment | each, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for index, each in enumerate(ranks)
    ]  # fmt: skip
    ended = [each.communicate() for each in running]
    assert [each.returncode for each in running] == [0] * len(ranks), ended[0][1][-2000:]
    return ended[0][0].splitlines()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [model_zoo.save_model(name, root / name) for name in MODELS]


@pytest.fixture(scope="module")
def alone(folders: list[Path]) -> list[str]:
    return lines_of(folders, [PLAIN])


def test_rows_and_threads_change_no_bit(alone: list[str]) -> None:
    """A line has the hashes of the first row alone, among 64, and of all rows, with one thread and then with two."""
    assert len(alone) == 2 * len(MODELS)
    for line in alone:
        _, one, first, many, *again = line.split()
        assert one == first != many and again == [one, first, many]


@pytest.mark.thorough  # test_integer_products.py compares the kernels of all instruction sets.
@pytest.mark.skipif("avx2" not in _sworker.integer_isas(), reason="this CPU has no AVX2")
def test_instruction_sets_change_no_bit(folders: list[Path], alone: list[str]) -> None:
    assert lines_of(folders, [AVX2]) == alone


@pytest.mark.thorough  # test_integer_ranks.py compares two ranks with one.
def test_two_ranks_change_no_bit(folders: list[Path], alone: list[str]) -> None:
    """Two ranks change no bit, even if each has another instruction set."""
    mixed = [PLAIN, AVX2 if "avx2" in _sworker.integer_isas() else PLAIN]
    assert lines_of(folders, mixed) == alone


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [PLAIN, AVX2], ids=["best", "avx2"])
def test_four_ranks_change_no_bit(folders: list[Path], alone: list[str], kind: dict[str, str]) -> None:
    assert lines_of(folders, [kind] * 4) == alone
