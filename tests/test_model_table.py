"""``docs/models.md`` has every architecture of the installed transformers, and its rows are true."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import transformers

ROOT = Path(__file__).parent.parent
DATA = json.loads((ROOT / "docs" / "assets" / "models.json").read_text("utf-8"))
ROWS = {row["architecture"]: row for row in DATA["rows"]}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("model_table", ROOT / "scripts" / "model_table.py")
    assert spec and spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # Its dataclass looks the module up there.
    spec.loader.exec_module(module)
    return module


def test_the_page_is_made_of_the_rows(script: ModuleType) -> None:
    page = (ROOT / "docs" / "models.md").read_text("utf-8")
    assert page == script.page(DATA["transformers"], DATA["rows"])
    assert all(name in page for name in ROWS)


@pytest.mark.skipif(DATA["transformers"] != transformers.__version__, reason="written for another transformers")
def test_every_architecture_has_its_row(script: ModuleType) -> None:
    assert list(ROWS) == script.model_types()


def test_none_crashed_and_none_differs() -> None:
    results = [row["result"] for row in ROWS.values()]
    assert set(results) == {"exact", "refused", "not tried"}
    assert results.count("not tried") < 8 and results.count("exact") > 100


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type",
    [
        "bert",
        "deepseek_v3",
        "gemma3n_text",
        pytest.param("gemma4_unified", marks=pytest.mark.thorough),
        pytest.param("moshi", marks=pytest.mark.thorough),
        pytest.param("phimoe", marks=pytest.mark.thorough),
        "whisper",
        "nemotron_h",
        pytest.param("kimi_linear", marks=pytest.mark.thorough),
    ],
)
def test_a_row_is_what_it_says(model_type: str, script: ModuleType) -> None:
    """Rows of each result and of several kinds of caches are run, including rows that were wrong before."""
    found = script.tried(model_type)
    assert script.record(found) == ROWS[model_type]


def test_a_child_that_crashes_or_hangs_is_a_row(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "LIMIT_SECONDS", 0.3)
    os, time = script.os, script.time
    assert script.in_a_fork("a", lambda name: os.kill(os.getpid(), 9)) == script.Row(
        "a", "crashed", "ended with status -9"
    )
    assert script.in_a_fork("a", lambda name: time.sleep(60)).reason == "ran past 0.3 s"
    assert script.in_a_fork("a", lambda name: script.Row(name, "exact")) == script.Row("a", "exact")
