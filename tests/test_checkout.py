"""Python in a source folder that is not built says what is wrong and what to do."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.processes import PATIENCE_SECONDS

import fastdecode

pytestmark = pytest.mark.slow

PACKAGE = Path(fastdecode.__file__).parent


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the sources alone, as a clone has them, and return their folder."""
    folder = tmp_path_factory.mktemp("clone")
    shutil.copytree(PACKAGE, folder / "fastdecode", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return folder


HIDE = """
import sys
sys.meta_path[:] = [each for each in sys.meta_path if "fastdecode" not in repr(each).lower()]
sys.path.insert(0, "")
"""
"""Code that hides this environment's installation, and looks into the current folder first as Python does."""


def run(checkout: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in the checkout by a Python that has all packages but this one."""
    command = [sys.executable, "-I", "-c", HIDE + code]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=PATIENCE_SECONDS)


WITHOUT_TORCH = "sys.modules['torch'] = None; "
"""Code that makes importing torch fail at once, which is seconds sooner than the import of the C++ part fails."""


@pytest.mark.parametrize("before", [WITHOUT_TORCH, pytest.param("", marks=pytest.mark.thorough)], ids=["early", "late"])
@pytest.mark.parametrize("name", ["LLM", pytest.param("LLMEngine", marks=pytest.mark.thorough)])
def test_an_import_says_what_is_wrong(name: str, before: str, checkout: Path) -> None:
    done = run(checkout, f"{before}from fastdecode import {name}")
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and last.startswith(f"ImportError: fastdecode.{name}: Python reads the source folder")
    assert "Run `make` there" in last and f"pip install {checkout}" in last


def test_a_command_says_so_in_one_line(checkout: Path) -> None:
    done = run(checkout, "from fastdecode.cli.main import main; sys.exit(main(['generate', 'hi']))")
    assert done.returncode == 1
    assert "fastdecode: error: Python reads the source folder" in done.stderr and "Traceback" not in done.stderr
