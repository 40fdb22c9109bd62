"""Rules for the tests themselves: what they import, that each ends, and that Ctrl-C reaches them."""

from __future__ import annotations

import ast
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import conftest
import pytest
from helpers.ports import first_given, free_port

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parent
MODULES = {path.stem: path for path in TESTS.rglob("test_*.py")}


def imported(source: str) -> Iterator[str]:
    """Yield the last part of every name that ``source`` imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[-1] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or "").split(".")[-1], *(alias.name for alias in node.names))


def test_no_test_module_imports_another() -> None:
    """Shared code is in tests/helpers, and stand-ins are in tests/doubles."""
    found = {path: set(imported(path.read_text(encoding="utf-8"))) for path in TESTS.rglob("*.py")}
    assert [f"{path.name}: {name}" for path, names in found.items() for name in names & MODULES.keys()] == []
    assert set(imported("import test_a\nfrom test_b import c\nfrom tests import test_d")) >= {
        "test_a",
        "test_b",
        "test_d",
    }


def test_groups_name_modules_that_are_there() -> None:
    assert set().union(*conftest.SHARED.values()) - MODULES.keys() == set()
    assert sum(map(len, conftest.SHARED.values())) == len(set().union(*conftest.SHARED.values()))


def test_every_test_has_a_time_limit(pytestconfig: pytest.Config) -> None:
    assert 0 < float(pytestconfig.getini("timeout")) < float(pytestconfig.getini("faulthandler_timeout"))


def test_ports_for_later_are_given_to_nobody_before() -> None:
    """If both came from one range, a rank whose port for newcomers is taken would be lost."""
    if first_given() < 20_000:
        pytest.skip("this machine gives nearly all ports")
    with socket.create_server(("127.0.0.1", 0)) as given:
        assert given.getsockname()[1] >= first_given()
    for count in (1, 3):
        assert 1024 < free_port(count) <= first_given() - count


def test_ctrl_c_interrupts() -> None:
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_interrupts_in_a_background_job() -> None:
    """The test above runs in a pytest that was started with SIGINT ignored, as a shell starts a job with "&"."""
    test = f"{__file__}::{test_ctrl_c_interrupts.__name__}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
    shell = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *command]
    run = subprocess.run(shell, capture_output=True, text=True, check=False)
    assert run.returncode == 0 and "1 passed" in run.stdout, run.stdout + run.stderr
