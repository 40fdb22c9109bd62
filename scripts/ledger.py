"""Print the ledger of measurements as a page, from docs/ledger/*.json: python scripts/ledger.py

`make site` renders the same page.

An entry has a title, a date, a machine, the commands that print its figures, and its text (figures, spreads and what
they mean) as lines of Markdown. ``commit``: where to find a command that has been removed since. ``helped``: whether
something that was tried helped.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent.parent / "docs"
FILES = {"measured": "What was measured", "tried": "What was tried"}
VERDICTS = {True: "helped", False: "did not help"}

HEAD = """# Ledger

The site's build makes this page from `docs/ledger/*.json`; edit those. [performance.md](performance.md) has
today's figures on one page. Machines are two virtual cores of a shared AMD EPYC (Zen 3: AVX2; Zen 4 and Zen 5: AVX-512
with VNNI and BF16). "A B A B": versions in turns, in one run. A commit stands where a script was removed later: check
that commit out to run the command.
"""


def main() -> None:
    print(rendered(DOCS / "ledger"))


def rendered(folder: Path) -> str:
    """Return the Markdown page of the entries in ``folder``.

    Raise KeyError if an entry lacks a title, a machine or its text.
    """
    parts = [HEAD]
    for name, heading in FILES.items():
        parts.append(f"# {heading}\n")
        for topic in json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))["topics"]:
            parts.append(f"## {topic['topic']}\n")
            parts += [entry_text(entry) for entry in topic["entries"]]
    return "\n".join(parts)


def entry_text(entry: dict[str, Any]) -> str:
    """Return one entry: its title, a line on where and how it was measured, and its text."""
    facts = [entry["machine"], entry.get("date"), VERDICTS.get(entry.get("helped"))]
    if entry.get("commit"):
        facts.append(f"command at commit {entry['commit']}")
    line = " · ".join(fact for fact in facts if fact)
    body = "\n".join(entry["text"])
    return f"### {entry['title']}\n\n{f'*{line}*' if line else ''}\n\n{body}\n".replace("\n\n\n\n", "\n\n")


if __name__ == "__main__":
    main()
