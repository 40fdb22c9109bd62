"""Pages about the structure name files, classes and functions that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STRUCTURE = (ROOT / "docs" / "structure.md").read_text("utf-8")
PAGE = STRUCTURE + "".join((ROOT / name).read_text("utf-8") for name in ("docs/extending.md", "CONTRIBUTING.md"))
DOORS = re.findall(r"`([\w.]+)` (?:in |\()`([\w/]+\.py)`", PAGE)
FOLDERS = ("", "fastdecode", "fastdecode/scheduler", "fastdecode/scheduler/policy")
FOLDERS += ("fastdecode/cli", "cluster", "rworker_cpp")


def place(path: str) -> Path | None:
    """Return the file that the page means, which may leave the first folders out."""
    return next((ROOT / folder / path for folder in FOLDERS if (ROOT / folder / path).is_file()), None)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:\w+/)+[\w.]+\.(?:py|cpp|hpp|md))`", PAGE))))
def test_files_are_there(path: str) -> None:
    assert "NAME" in path or place(path)


@pytest.mark.parametrize(("name", "path"), sorted(set(DOORS)))
def test_doors_are_there(name: str, path: str) -> None:
    file = place(path)
    assert file, path
    *owner, last = name.split(".")
    text = file.read_text("utf-8")
    assert re.search(rf"^\s*(class|def|async def) {last}\b|^{last}\b.* = ", text, re.MULTILINE), name
    assert not owner or re.search(rf"^class {owner[0]}\b", text, re.MULTILINE), name


def test_the_glossary_is_short() -> None:
    """A newcomer reads all of the glossary."""
    glossary = STRUCTURE.split("## Glossary\n")[1].split("\n## ")[0]
    assert 20 <= len(re.findall(r"^- \*\*", glossary, re.MULTILINE)) <= 25


def test_the_page_is_short() -> None:
    assert STRUCTURE.count("\n") <= 250


def test_the_index_has_every_decision() -> None:
    folder = ROOT / "docs" / "decisions"
    index = (folder / "index.md").read_text("utf-8")
    rows = dict(re.findall(r"^- \[.*\]\(([\w-]+\.md)\), (\d{4}-\d\d-\d\d)$", index, re.MULTILINE))
    pages = {each.name: each.read_text("utf-8") for each in folder.glob("*.md") if each.name != "index.md"}
    assert set(rows) == set(pages)
    for name, text in pages.items():
        assert f"\n*{rows[name]}*\n" in text and "**Alternatives.**" in text and text.count("\n") <= 40, name
