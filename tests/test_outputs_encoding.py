"""Commands print any text of a model in any encoding, and run when nobody reads their output."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest
from helpers.processes import PATIENCE_SECONDS

from fastdecode.cli.main import main

SMALL = ["--max-tokens", "4", "--max-model-len", "256", "--kv-cache-memory", "16MiB", "--s-threads", "1"]


@pytest.mark.parametrize("flags", [[], ["--json"]], ids=["text", "json"])
@pytest.mark.parametrize(
    ("encoding", "errors"), [("ascii", "strict"), ("ascii", "surrogateescape"), ("cp1252", "strict")]
)
def test_what_an_encoding_lacks_is_replaced(
    encoding: str, errors: str, flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding, errors=errors))
    assert main(["generate", "naïve 日本 😀", *flags, *SMALL]) == 0
    text = written.getvalue().decode(encoding)
    assert ("na?ve ?? ?" if encoding == "ascii" else "naïve ?? ?") in text


def start(command: list[str], redirected: str = "", **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run a command in a process of its own."""
    words = ["bash", "-c", f'"$@" {redirected}', "bash", sys.executable, "-m", "fastdecode.cli.main", *command]
    return subprocess.run(words, env=os.environ | environment, capture_output=True, timeout=PATIENCE_SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_outputs_stop_nothing(closed: str) -> None:
    done = start(["collect-env"], closed)
    assert done.returncode == 0 and b"Traceback" not in done.stderr, done


@pytest.mark.thorough  # The command loads a model.
def test_a_model_runs_with_its_outputs_closed() -> None:
    assert start(["generate", "é", *SMALL], ">&- 2>&-").returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [pytest.param("doctor", marks=pytest.mark.thorough), "collect-env", "plan --help", "serve --help"]
)
def test_commands_print_in_ascii(command: str) -> None:
    done = start(command.split(), LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert done.stdout and b"UnicodeEncodeError" not in done.stderr, done
    done.stdout.decode("ascii")
