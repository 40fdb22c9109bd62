"""R-workers' choice of an arithmetic, what is kept of it, and one arithmetic for all where asked for."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from helpers import r_workers

from fastdecode import LLM, SamplingParams, _rworker
from fastdecode.cluster.pool.inproc import InprocBackend
from fastdecode.cluster.pool.tcp import TcpBackend
from fastdecode.cluster.r_worker import tuning
from fastdecode.cluster.r_worker.host import RWorkerSize
from fastdecode.core.errors import ConfigError
from fastdecode.core.types import ISAS, READ_AHEAD, best_common_isa
from fastdecode.kinds import Dense
from fastdecode.kinds.layout import KVLayout

pytestmark = pytest.mark.slow

LAYOUT = KVLayout((Dense(4, 2, 16, 16, 0.25),), "float32", "float32")
SUPPORTED = _rworker.supported_isas()


@pytest.fixture(autouse=True)
def _own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set an empty cache folder, and force no arithmetic."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("FASTDECODE_ISA", raising=False)
    monkeypatch.delenv("FASTDECODE_READ_AHEAD", raising=False)
    tuning.measured_tuning.cache_clear()
    yield
    tuning.measured_tuning.cache_clear()


def kept_file(folder: Path) -> Path:
    (path,) = (folder / "fastdecode").iterdir()
    return path


@pytest.mark.parametrize(
    ("isas", "common"),
    [
        (["avx2"], "avx2"), (["avx512_bf16", "avx512"], "avx512"), (["avx2", "scalar"], "scalar"),
        (["neon_bf16", "neon_dot"], "neon_dot"), (["neon", "avx2"], "scalar"),
    ],
)  # fmt: skip
def test_the_arithmetic_that_all_have(isas: list[str], common: str) -> None:
    assert best_common_isa(isas) == common


def test_names_of_instruction_sets_are_known_and_in_order() -> None:
    assert tuple(SUPPORTED) == tuple(isa for isa in ISAS if isa in SUPPORTED)


def test_a_choice_is_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = tuning.tuning()
    assert first.isa in SUPPORTED and first.read_ahead in READ_AHEAD
    assert json.loads(kept_file(tmp_path).read_text()) == {"isa": first.isa, "read_ahead": first.read_ahead}
    tuning.measured_tuning.cache_clear()
    monkeypatch.setattr(tuning, "fastest_isa", lambda: pytest.fail("measured again"))
    assert tuning.tuning() == first


@pytest.mark.parametrize(
    "kept", ["", "{", '{"isa": "mmx", "read_ahead": "run"}', '{"isa": "scalar", "streams": 1}', "[1]"]
)
def test_what_is_kept_is_checked(kept: str, tmp_path: Path) -> None:
    first = tuning.tuning()
    kept_file(tmp_path).write_text(kept)
    tuning.measured_tuning.cache_clear()
    assert tuning.tuning().isa == first.isa
    assert json.loads(kept_file(tmp_path).read_text())["isa"] == first.isa


def test_a_home_that_cannot_be_written_is_no_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert tuning.tuning().isa in SUPPORTED


def test_a_user_without_a_home_measures_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", unknown)
    assert tuning.tuning().isa in SUPPORTED


class Trial:
    """Returns the seconds that a test sets for each trial; another process disturbs the first."""

    took: ClassVar[dict[str, float]] = {}

    def __init__(self, isa: str, read_ahead: str = "run", *size: int, rows: int = 1) -> None:
        self.tried, self.late = isa if isa != "auto" else read_ahead, 9.0

    def seconds(self) -> float:
        late, self.late = self.late, 0.0
        return self.took[self.tried] + late


@pytest.mark.parametrize(("seconds", "isa"), [((1.0, 0.9), "avx512_vnni"), ((1.0, 0.97), "avx512_bf16")])
def test_the_faster_arithmetic_is_chosen_by_a_margin(
    seconds: tuple[float, float], isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trial, "took", dict(zip(("avx512_bf16", "avx512_vnni"), seconds, strict=True)))
    monkeypatch.setattr(tuning, "_Trial", Trial)
    monkeypatch.setattr(tuning._rworker, "supported_isas", lambda: list(ISAS[:5]))
    assert tuning.fastest_isa() == isa


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [((1.0, 0.96, 1.1), "run"), ((1.0, 0.8, 0.9), "run-l2"), ((1.0, 0.9, 0.7), "pages"), ((1.0, 3.0, 3.0), "run")],
)
def test_the_fastest_way_to_read_ahead_is_chosen_by_a_margin(
    seconds: tuple[float, ...], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trial, "took", dict(zip(READ_AHEAD, seconds, strict=True)))
    monkeypatch.setattr(tuning, "_Trial", Trial)
    assert tuning.fastest_read_ahead() == chosen


def test_a_trial_of_reading_reads_more_than_a_cache_holds() -> None:
    trial = tuning._Trial("auto", "pages", tuning.SEQUENCES, tuning.KV_HEADS)
    assert trial.seconds() > 0 and trial._worker.statistics()["bytes_read"] > 48 << 20


def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "fastest_isa", lambda: pytest.fail("measured"))
    monkeypatch.setenv("FASTDECODE_ISA", "scalar")
    monkeypatch.setenv("FASTDECODE_READ_AHEAD", "pages")
    assert tuning.tuning() == tuning.Tuning("scalar", "pages")
    monkeypatch.setenv("FASTDECODE_READ_AHEAD", "2")
    with pytest.raises(ConfigError, match="FASTDECODE_READ_AHEAD must be one of run, run-l2, pages, not '2'"):
        tuning.tuning()
    monkeypatch.setenv("FASTDECODE_ISA", "mmx")
    with pytest.raises(ConfigError, match=r"FASTDECODE_ISA: this machine supports scalar.*, not 'mmx'"):
        tuning.tuning()


def test_a_bad_setting_is_refused_before_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line refuses it before torch is imported, and the engine before it looks for a model."""
    code = """
import sys
from fastdecode.cli.main import main
status = main(["generate", "x"])
print(status, "torch" in sys.modules)
"""
    monkeypatch.setenv("FASTDECODE_ISA", "mmx")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "2 False\n"
    with pytest.raises(ConfigError, match="FASTDECODE_ISA: this machine supports scalar") as refusal:
        LLM("/no/such/folder")
    assert str(refusal.value).split(": ")[1] in run.stderr


def test_reading_ahead_changes_no_bit() -> None:
    outputs = []
    for read_ahead in READ_AHEAD:
        worker = _rworker.RWorker(
            layers=[Dense(4, 2, 64, 64, 0.1)], model_dtype="float32", kv_dtype="bfloat16", block_size=16,
            num_blocks=64, num_threads=1, read_ahead=read_ahead,
        )  # fmt: skip
        rng = np.random.default_rng(0)
        q, k, v = (rng.standard_normal((700, heads, 64), dtype=np.float32) for heads in (4, 2, 2))
        out = np.empty_like(q)
        worker.begin_step(np.zeros((0, 4), np.int64), [np.array([[0, 0, 700, 1]])])
        worker.run(0, 0, q, k, v, out)
        outputs.append(out)
    for output in outputs[1:]:
        np.testing.assert_array_equal(output, outputs[0])
    with pytest.raises(ValueError, match="read_ahead is '2'; it must be run, run-l2 or pages"):
        _rworker.RWorker(
            layers=[Dense(1, 1, 8, 8, 1.0)], model_dtype="float32", kv_dtype="float32", block_size=16,
            num_blocks=1, num_threads=1, read_ahead="2",
        )  # fmt: skip


def test_one_arithmetic_for_all_threads() -> None:
    backend = InprocBackend([RWorkerSize(1 << 24, 1)] * 2, 16)
    assert {info.isa for info in backend.open(replace(LAYOUT, isa="scalar"))} == {"scalar"}
    backend.close()


def test_the_engine_passes_it_on() -> None:
    with LLM(uniform_arithmetic="scalar", kv_cache_memory="64MiB", max_model_len=64) as llm:
        assert [worker.isa for worker in llm.engine.r_workers] == ["scalar"]
        assert llm.generate(["def"], SamplingParams(max_tokens=2), use_tqdm=False)[0].outputs[0].token_ids
    with pytest.raises(ConfigError, match="uniform_arithmetic must be one of auto, scalar, avx2"):
        LLM(uniform_arithmetic="fast")


@pytest.mark.skipif(len(SUPPORTED) < 2, reason="this machine has one instruction set")
def test_unlike_r_workers_are_named_and_can_be_made_alike(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as processes:
        _, free = processes.enter_context(r_workers.listening())
        monkeypatch.setenv("FASTDECODE_ISA", "scalar")
        _, forced = processes.enter_context(r_workers.listening())
        monkeypatch.delenv("FASTDECODE_ISA")
        with caplog.at_level(logging.WARNING):
            backend = TcpBackend([free, forced], 16)
            best = backend.open(LAYOUT)[0].isa
            backend.close()
        assert f"R-workers attend in different arithmetic ({best} on {free}, scalar on {forced})" in caplog.text
        assert "--uniform-arithmetic scalar makes all use one" in caplog.text
        caplog.clear()
        backend = TcpBackend([free, forced], 16)
        assert [info.isa for info in backend.open(replace(LAYOUT, isa="scalar"))] == ["scalar"] * 2
        backend.close()
        assert "different arithmetic" not in caplog.text
        backend = TcpBackend([free, forced], 16)
        with pytest.raises(ConfigError, match=rf"{forced}: .* asks for avx2 arithmetic, and FASTDECODE_ISA is scalar"):
            backend.open(replace(LAYOUT, isa="avx2"))
