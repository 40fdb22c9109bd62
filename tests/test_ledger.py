"""The ledger's page has every entry, and each command of an entry exists or names the commit that has it."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
LEDGER = ROOT / "docs" / "ledger"


def ledger_script() -> ModuleType:
    """Return ``scripts/ledger.py`` as a module."""
    spec = importlib.util.spec_from_file_location("ledger", ROOT / "scripts" / "ledger.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def entries() -> list[dict[str, Any]]:
    """Return all entries of all topics."""
    files = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(LEDGER.glob("*.json"))]
    return [entry for file in files for topic in file["topics"] for entry in topic["entries"]]


def test_the_page_has_every_entry() -> None:
    page = ledger_script().rendered(LEDGER)
    assert all(f"### {entry['title']}\n" in page for entry in entries())


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry["title"])
def test_scripts_that_an_entry_names_exist_or_have_a_commit(entry: dict[str, Any]) -> None:
    """The command of each figure can be run, here or at the commit that the entry names."""
    named = re.findall(r"benchmarks/\w+\.py", " ".join([*entry["command"], *entry["text"]]))
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing or entry.get("commit"), missing


def test_files_of_the_ledger_are_all_rendered() -> None:
    """A JSON file that the script does not know would be left out silently."""
    assert {path.stem for path in LEDGER.glob("*.json")} == set(ledger_script().FILES)
