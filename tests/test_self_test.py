"""Kernels that do not compute what the scalar ones do: no R-worker is made of them, and the doctor says so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fastdecode import _rworker
from fastdecode.cli.doctor import Finding, check_kernels
from fastdecode.cluster.r_worker import host as local
from fastdecode.cluster.r_worker.host import take_host
from fastdecode.core.errors import BackendError
from fastdecode.core.types import KVLayout, LayerLayout

REFUSAL = "instruction set avx512 is broken here: the attention of a int8 cache; set FASTDECODE_ISA=avx2"
LAYOUT = KVLayout((LayerLayout(2, 1, 8, 8, 1.0),), "float32", "float32")
SIZE = local.RWorkerSize(1 << 20, 1)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The instruction sets that were tested, every one of which is found broken."""
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


def test_the_doctor_names_each_and_its_cure(asked: list[str]) -> None:
    findings = list(check_kernels())
    assert asked == _rworker.supported_isas() and len(findings) == len(asked)
    assert findings[0] == Finding("broken", *REFUSAL.split("; "))
