"""Kernels that differ from the scalar ones: no R-worker uses them, and the doctor says so."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from fastdecode import _rworker
from fastdecode.cli.doctor import check_kernels
from fastdecode.cli.findings import Finding
from fastdecode.cluster.r_worker import host as local
from fastdecode.cluster.r_worker.host import take_host
from fastdecode.core.errors import BackendError, ConfigError
from fastdecode.core.types import ISAS
from fastdecode.kinds import Dense
from fastdecode.kinds.layout import KVLayout

REFUSAL = "instruction set avx512 is broken here: the attention of a int8 cache; set FASTDECODE_ISA=avx2"
LAYOUT = KVLayout((Dense(2, 1, 8, 8, 1.0),), "float32", "float32")
SIZE = local.RWorkerSize(1 << 20, 1)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yield the instruction sets that were tested, every one of which is found broken."""
    isas: list[str] = []
    monkeypatch.setattr(_rworker, "self_test", lambda isa: isas.append(isa) or REFUSAL)
    local.check_isa.cache_clear()
    yield isas
    local.check_isa.cache_clear()


def test_every_instruction_set_passes_here() -> None:
    assert [_rworker.self_test(isa) for isa in _rworker.supported_isas()] == [None] * len(_rworker.supported_isas())
    with pytest.raises(ValueError, match="isa is 'quantum'; this machine supports scalar"):
        _rworker.self_test("quantum")


def test_no_r_worker_is_made_of_broken_kernels(asked: list[str]) -> None:
    with pytest.raises(BackendError, match=r"avx512 is broken here: .*int8 cache.*FASTDECODE_ISA=avx2"):
        local.make_rworker(LAYOUT, 16, SIZE)
    assert len(asked) == 1 and asked[0] in _rworker.supported_isas()


def test_an_r_worker_process_does_not_begin_to_serve(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTDECODE_ISA", "scalar")
    with pytest.raises(BackendError, match="is broken here"):
        take_host(None, 1, 1 << 20)
    assert asked == ["scalar"]


def test_a_process_asks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(_rworker, "self_test", asked.append)
    local.check_isa.cache_clear()
    for _ in range(3):
        local.make_rworker(LAYOUT, 16, SIZE).close()
    assert len(asked) == 1


def test_what_the_system_does_not_give_is_one_clear_line() -> None:
    """The process may take 64 MiB more, too little for a cache or for threads' stacks."""
    run = subprocess.run([sys.executable, "-c", SHORT_OF_MEMORY], capture_output=True, text=True, check=True)
    assert "no memory for a KV cache of 1,073,741,824 bytes; give less --kv-cache-memory" in run.stdout
    assert "an R-worker's 99 thread(s) do not start (Resource temporarily unavailable): give fewer" in run.stdout


SHORT_OF_MEMORY = """
import resource
import psutil
from fastdecode.cluster.r_worker.host import RWorkerSize, make_rworker
from fastdecode.core.errors import CapacityError
from fastdecode.kinds import Dense
from fastdecode.kinds.layout import KVLayout
layout = KVLayout((Dense(2, 1, 8, 8, 1.0),), "float32", "float32")
make_rworker(layout, 16, RWorkerSize(1 << 20, 1)).close()
most = psutil.Process().memory_info().vms + (64 << 20)
resource.setrlimit(resource.RLIMIT_AS, (most, most))
for size in (RWorkerSize(1 << 30, 1), RWorkerSize(1 << 12, 99)):
    try:
        make_rworker(layout, 16, size)
    except CapacityError as error:
        print(error)
"""


def test_an_instruction_set_that_this_processor_lacks_is_named_with_those_it_has() -> None:
    lacking = sorted(set(ISAS) - set(_rworker.supported_isas()))
    if not lacking:
        pytest.skip("this processor has all")
    with pytest.raises(ConfigError, match=f"processor has scalar.*, and not {lacking[0]}"):
        local.make_rworker(replace(LAYOUT, isa=lacking[0]), 16, SIZE)


def test_the_doctor_names_each_and_its_cure(asked: list[str]) -> None:
    findings = list(check_kernels())
    assert asked == _rworker.supported_isas() and len(findings) == len(asked)
    assert findings[0] == Finding("broken", *REFUSAL.split("; "))
