"""An R-worker on a system that is not Linux, imitated on Linux by hiding what only its kernel has."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import r_workers

from fastdecode import LLM, SamplingParams

OF_LINUX = (
    "eventfd", "fdatasync", "memfd_create", "pidfd_open", "posix_fadvise", "posix_fallocate", "sched_getaffinity",
    "sched_setaffinity",
)  # fmt: skip
"""Functions of module `os` that this project calls and macOS lacks."""

WITHOUT = """
import os, pathlib, sys
for name in {names}:
    delattr(os, name)
plain = pathlib.Path.read_text
def read_text(path, *arguments, **words):
    if str(path).startswith(("/proc", "/sys")):
        raise FileNotFoundError(path)
    return plain(path, *arguments, **words)
pathlib.Path.read_text = read_text
from fastdecode.cli.main import main
sys.exit(main())
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``r_workers`` start `fastdecode` as on such a system."""
    script, program = tmp_path / "without.py", tmp_path / "fastdecode"
    script.write_text(WITHOUT.format(names=[name for name in OF_LINUX if hasattr(os, name)]))
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv(r_workers.PROGRAM, str(program))


@pytest.mark.slow
@pytest.mark.usefixtures("program")
def test_it_serves_over_tcp(tmp_path: Path) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    prompts = [{"prompt_token_ids": list(range(1, 1 + length))} for length in (3, 40)]

    def tokens(**settings: Any) -> list[list[int]]:
        with LLM(dtype="float32", max_model_len=64, **settings) as llm:
            return [output.outputs[0].token_ids for output in llm.generate(prompts, greedy, use_tqdm=False)]

    with r_workers.listening("--park-dir", str(tmp_path / "parked")) as (_, address):
        there = tokens(r_workers=address)
    assert there == tokens(kv_cache_memory="64MiB")


@pytest.mark.usefixtures("program")
def test_cores_are_refused_where_no_process_is_bound_to_them() -> None:
    with pytest.raises(RuntimeError, match="leave --cores out"), r_workers.listening("--cores", "0"):
        pass
