"""Runs that are refused late leave neither a park folder nor a journal."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from helpers import r_workers

from fastdecode.api.config import EngineConfig
from fastdecode.core.errors import CapacityError, ConfigError
from fastdecode.core.own_folder import leave_folder, make_folder
from fastdecode.engine.engine import LLMEngine
from fastdecode.journal.places import FILE, Folder

SETTINGS: dict[str, Any] = {"device": "cpu", "s_threads": 1, "r_threads": 1, "kv_cache_memory": "512KiB"}


def test_a_folder_goes_as_far_as_it_was_made_and_is_empty(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    make_folder(tmp_path / "a" / "b" / "c")
    make_folder(tmp_path / "a" / "b" / "d")
    (tmp_path / "a" / "b" / "c" / "lock").touch()
    (tmp_path / "a" / "b" / "d" / "x").touch()
    leave_folder(tmp_path / "a" / "b" / "c", "lock")
    leave_folder(tmp_path / "a" / "b" / "d", "lock")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "b", "d", "x"]
    (tmp_path / "a" / "b" / "d" / "x").unlink()
    leave_folder(tmp_path / "a" / "b" / "d")
    leave_folder(tmp_path / "a")
    assert [path.name for path in tmp_path.rglob("*")] == ["a"]


@pytest.mark.parametrize("r_workers", ["inproc:2", pytest.param("spawn:2", marks=pytest.mark.slow)])
def test_what_is_refused_for_its_capacity_leaves_nothing(tmp_path: Path, r_workers: str) -> None:
    """The R-workers and their folders are open already."""
    places = {"park_dir": str(tmp_path / "park" / "here"), "journal": str(tmp_path / "journal")}
    with pytest.raises(CapacityError, match="one sequence of max_model_len"):
        LLMEngine(EngineConfig(max_model_len=2048, r_workers=r_workers, **places, **SETTINGS))
    assert list(tmp_path.iterdir()) == []


def test_what_is_refused_when_its_journal_is_open_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine's last part fails; an existing folder stays, and so does a journal with records."""

    def refuse(*_: Any) -> None:
        raise ConfigError("no")

    config = EngineConfig(max_model_len=64, journal=str(tmp_path / "journal"), **SETTINGS)
    with monkeypatch.context() as patched:
        patched.setattr("fastdecode.engine.compose.build.make_parking", refuse)
        with pytest.raises(ConfigError, match="no"):
            LLMEngine(config)
        assert list(tmp_path.iterdir()) == []
        (tmp_path / "journal").mkdir()
        with pytest.raises(ConfigError, match="no"):
            LLMEngine(config)
    assert (tmp_path / "journal" / FILE).exists()
    place = Folder(str(tmp_path / "another"))
    place.replace(b"a")
    place.append(b"b")
    place.close()
    assert (tmp_path / "another" / FILE).read_bytes() == b"ab"


def test_an_r_worker_that_is_refused_leaves_nothing(tmp_path: Path) -> None:
    command = [r_workers.FASTDECODE, "r-worker", "--listen", "tcp://127.0.0.1:0", "--kv-cache-memory", "90TiB"]
    done = subprocess.run([*command, "--park-dir", str(tmp_path / "park")], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "are more than the" in done.stderr
    assert list(tmp_path.iterdir()) == []
