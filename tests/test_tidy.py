"""``scripts/tidy.py`` finds the forms that our English avoids, and counts stay below their ceilings."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))

import tidy

AVOIDED = {
    "anew": "whose name is given anew",
    "goes on": "Where a restart goes on where it was",
    "is to": "R-workers are to call the first segment",
    "what it held": "less what it held",
    "of which": "of which there is no beginning",
    "those that": "for those of a sequence",
    "that of": "Of several copies that of the latest epoch counts",
    "but for": "are wrong, but for one",
    "wanted were": "wanted were rows",
    "is told": "what R-workers are told of a step",
    "lies": "where the state of a head lies",
}
"""A sample of each form, by its name."""


@pytest.mark.thorough  # `make lint` runs the script itself
def test_counts_stay_below_their_ceilings() -> None:
    counts = tidy.measured()
    assert {name: count for name, count in counts.items() if count > tidy.CEILINGS[name]} == {}
    assert counts.keys() == tidy.CEILINGS.keys()


@pytest.mark.parametrize("form", AVOIDED)
def test_a_form_is_found(form: str) -> None:
    assert re.search(tidy.WORDS[form], AVOIDED[form])
    assert not re.search(tidy.WORDS[form], "Return the cache id of the first segment of the sequence.")


def test_sentences_are_those_of_the_prose() -> None:
    page = (
        "# Not a heading\n\nOne is short. Two has `code`.\n\n```sh\nnot code\n```\n\n| not | a table |\n\n- an item\n"
    )
    assert tidy.sentences(page) == ["One is short.", "Two has `code`.", "- an item"]


def test_a_form_above_its_ceiling_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(tidy, "measured", lambda: {"pages: anew": 3})
    monkeypatch.setitem(tidy.CEILINGS, "pages: anew", 2)
    assert tidy.main([]) == 1 and "pages: anew: 3, at most 2" in capsys.readouterr().out
    monkeypatch.setitem(tidy.CEILINGS, "pages: anew", 3)
    assert tidy.main([]) == 0
