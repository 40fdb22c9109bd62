"""``docs/features.md`` says which pairs of features are refused today."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_page_is_today_s() -> None:
    """A change of a refusal needs ``python scripts/features.py``."""
    spec = importlib.util.spec_from_file_location("features", ROOT / "scripts" / "features.py")
    assert spec and spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert (ROOT / "docs" / "features.md").read_text("utf-8") == script.rendered()
