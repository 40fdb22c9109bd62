"""Write the lists of vLLM's settings in docs/api.md: python scripts/vllm_table.py

The page lists only settings that are refused, or that work in another way than in vLLM. The site lists all settings
(``full``), and those of `bench`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from fastdecode.api.from_vllm import MEMBERS, NAMES, OF_BATCHES, OF_ENGINES, OF_SERVERS
from fastdecode.api.vllm.environment import INSTEAD
from fastdecode.api.vllm.environment import TAKEN as VARIABLES
from fastdecode.api.vllm.foreign import Foreign
from fastdecode.api.vllm.python import CALL_ARGUMENTS, SAMPLING_IGNORED, SAMPLING_REFUSED
from fastdecode.api.vllm.taken import TAKEN
from fastdecode.perfmodel.lab.cli.vllm_bench import OF_BENCHES

PAGE = Path(__file__).parent.parent / "docs" / "api.md"
BEGIN, END = "<!-- vllm_table -->\n", "<!-- end of vllm_table -->\n"
MOST_CHARACTERS = 190
"""Most characters of a cell."""

HEAD = "| setting or flag of vLLM | here | note |\n|---|---|---|\n"


def main() -> None:
    """Write the page with updated lists; with ``--all``, print all lists instead."""
    if "--all" in sys.argv:
        print(full())
        return
    PAGE.write_text(rendered(PAGE.read_text("utf-8")), "utf-8")


def rendered(page: str) -> str:
    """Return ``page`` with updated lists between the marks BEGIN and END."""
    before, rest = page.split(BEGIN)
    lists: dict[str, list[str]] = {}
    for names, here, text in _rows():
        if text and "no effect" not in here.lower() and "bench" not in here:
            lists.setdefault(here, []).append(f"- {names}: {text}")
    blocks = [f"**{here}**\n\n" + "\n".join(lines) + "\n" for here, lines in lists.items()]
    return before + BEGIN + "\n" + "\n".join(blocks) + "\n" + END + rest.split(END)[1]


FULL_HEAD = """# All of vLLM's settings

[Coming from vLLM](api.md#coming-from-vllm) says what each kind means. The command line has the same names with hyphens.

"""


def full() -> str:
    """Return a page with all settings, flags, environment variables and missing names."""
    lists = {"Imports that are refused": NAMES, "Methods of `LLM` that are not there": MEMBERS}
    missing = (f"\n## {title}\n\n" + _list(names) for title, names in lists.items())
    return FULL_HEAD + _table() + "".join(missing)


def _list(names: dict[str, str]) -> str:
    return "".join(f"- `{name}`: {text}\n" for name, text in sorted(names.items()))


def _table() -> str:
    return HEAD + "\n".join(f"| {' | '.join(row)} |" for row in _rows()) + "\n"


def _rows() -> Iterator[tuple[str, str, str]]:
    yield from _block("Taken", _by_text(TAKEN))
    engines, servers = [*OF_ENGINES.values()], [*OF_SERVERS.values()]
    for here, is_refused in (("No effect", False), ("Refused", True)):
        found = {each.name: each.text for each in (*engines, *servers) if each.refused is is_refused}
        yield from _block(here, _by_text(found))
    yield from _block("`SamplingParams`: no effect", _texts(SAMPLING_IGNORED))
    yield from _block("`SamplingParams`: refused", _texts(SAMPLING_REFUSED))
    yield from _block("`generate`, `chat`: refused", _texts(CALL_ARGUMENTS))
    for here, is_refused in (("`bench`: no effect", False), ("`bench`: refused", True)):
        found = {each.name: each.text for each in OF_BENCHES.values() if each.refused is is_refused}
        yield from _block(here, _by_text(found))
    yield from _block("`run-batch`: no effect", _texts(OF_BATCHES))
    yield from _block("Variables that are taken", _by_text(VARIABLES))
    yield from _block("Variables: no effect", _by_text(INSTEAD))


def _texts(foreign: dict[str, Foreign]) -> dict[str, list[str]]:
    return _by_text({each.name: each.text for each in foreign.values()})


def _by_text(texts: dict[str, str]) -> dict[str, list[str]]:
    """Return the names grouped by their text."""
    found: dict[str, list[str]] = {}
    for name, text in texts.items():
        found.setdefault(text, []).append(name)
    return found


def _block(here: str, names: dict[str, list[str]]) -> Iterator[tuple[str, str, str]]:
    """Yield rows for names grouped by text; a row holds as many names as fit a cell."""
    for text, each in names.items():
        cell = ""
        for name in sorted(each):
            if len(cell) + len(name) > MOST_CHARACTERS:
                yield cell, here, text
                cell = ""
            cell += f"{', ' if cell else ''}`{name}`"
        yield cell, here, text


if __name__ == "__main__":
    main()
