"""Count words and forms that our English avoids, and check that no count exceeds its ceiling: python scripts/tidy.py

If a count gets lower, lower its ceiling too. ``python scripts/tidy.py NAME`` prints where the form NAME occurs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "docs/**/*.md", "examples/**/*.md")
PYTHON = ("fastdecode/**/*.py", "sworker/**/*.py", "cluster/**/*.py", "perfmodel/**/*.py", "scripts/*.py")
TESTS = ("tests/**/*.py", "fuzz/*.py", "benchmarks/*.py", "examples/**/*.py")
CODE = (*PYTHON, "benchmarks/*.py", "rworker_cpp/**/*.[ch]pp", "sworker/cpp/*.[ch]pp")

WORDS = {
    "anew": r"\banew\b",
    "goes on": r"\b(?:goes?|going|went|gone) on (?!a\b|the\b|an\b)",
    "is to": r"\b(?:is|are|was|were) to (?!the\b|a\b|an\b|be found\b)",
    "has its due": r"\b(?:has|have|had) (?:its|their) due\b",
    "so far": r"\bso far\b",
    "wanted were": r"\bwanted were\b",
    "gives way": r"\b(?:gives?|gave|giving) way\b",
    "is let go": r"\b(?:is|are|was|were|be) let go\b",
    "has come back": r"\b(?:has|have|had) come back\b",
    "what it held": r"\bwhat (?:it|they) (?:held|hold|holds)\b",
    "of which": r"\bof which\b",
    "those that": r"\bthose (?:that|which|of)\b",
    "what is left of": r"\bwhat (?:is|was) left\b",
    "that of": r"\bthat of\b",
    "but for": r"\bbut for\b",
    "is told": r"\b(?:is|are|was|were|be) told\b(?! apart)",
    "whoever": r"\bwhoever\b",
    "what is": r"\bwhat (?:is|are|was|were)\b",
    "lies": r"\bl(?:ies|ay)\b",
    "company": r"\bcompany\b",
}
"""Forms of words to avoid, by the names of their ceilings."""

LISTS = ("models.md", "features.md")
"""Pages with lists of names, which scripts write."""

MOST_WORDS_OF_A_SENTENCE = 25
MOST_CHARACTERS_OF_A_CELL = 200

CEILINGS = {
    "pages: anew": 1,
    "pages: goes on": 0,
    "pages: is to": 1,
    "pages: has its due": 0,
    "pages: so far": 0,
    "pages: wanted were": 0,
    "pages: gives way": 0,
    "pages: is let go": 0,
    "pages: has come back": 0,
    "pages: what it held": 0,
    "pages: of which": 0,
    "pages: those that": 3,
    "pages: what is left of": 0,
    "pages: that of": 1,
    "pages: but for": 0,
    "code: anew": 7,
    "code: goes on": 2,
    "code: is to": 5,
    "code: has its due": 0,
    "code: so far": 6,
    "code: wanted were": 0,
    "code: gives way": 0,
    "code: is let go": 1,
    "code: has come back": 0,
    "code: what it held": 0,
    "code: of which": 24,
    "code: those that": 117,
    "code: what is left of": 0,
    "code: that of": 18,
    "code: but for": 1,
    "pages: is told": 1,
    "pages: whoever": 2,
    "pages: what is": 11,
    "pages: lies": 0,
    "pages: company": 2,
    "code: is told": 5,
    "code: whoever": 1,
    "code: what is": 26,
    "code: lies": 13,
    "code: company": 1,
    "pages: sentences of over 25 words": 0,
    "code: docstrings that are fragments": 0,
    "tests: docstrings that are fragments": 0,
    "docs: table cells of over 200 characters": 0,
    "docs: words": 25000,
    "README.md: words": 640,
    "README.md: lines": 80,
    "CONTRIBUTING.md: lines": 120,
    "SECURITY.md: lines": 120,
    "CHANGELOG.md: lines": 40,
    "docs/structure.md: lines": 180,
    "docs/performance.md: rows": 40,
}
"""The highest count that each form may have: in pages, and in code with its docstrings, comments and messages."""


def files(patterns: tuple[str, ...]) -> list[Path]:
    """Return the files of the repository that match one of ``patterns``, except links to packages and this file."""
    found = {path for pattern in patterns for path in ROOT.glob(pattern)}
    linked = [ROOT / "fastdecode" / name for name in ("sworker", "cluster", "perfmodel")]
    linked.append(Path(__file__))  # this file contains the words that it looks for
    return sorted(path for path in found if path not in linked and not any(link in path.parents for link in linked))


def texts(patterns: tuple[str, ...]) -> Iterator[tuple[Path, str]]:
    """Yield each file with its text. Line breaks and comment signs are replaced by single spaces."""
    for path in files(patterns):
        yield path, re.sub(r"\s*\n\s*(?:#|//|\*)?\s*", " ", path.read_text("utf-8"))


def places(name: str) -> list[str]:
    """Return a line for each occurrence of a form: the file, and the words around it."""
    where, form = name.split(": ")
    pattern = re.compile(WORDS[form], re.IGNORECASE)
    return [
        f"{path.relative_to(ROOT)}: …{text[max(0, match.start() - 40) : match.end() + 40]}…"
        for path, text in texts(PAGES if where == "pages" else CODE)
        for match in pattern.finditer(text)
    ]


def long_sentences() -> list[str]:
    """Return the sentences of pages that have more than 25 words."""
    return [
        f"{path.relative_to(ROOT)}: {sentence}"
        for path in files(PAGES)
        if path.name not in LISTS
        for sentence in sentences(path.read_text("utf-8"))
        if len(sentence.split()) > MOST_WORDS_OF_A_SENTENCE
    ]


def sentences(page: str) -> list[str]:
    """Return the sentences of a Markdown page's prose, without code, tables, headings and link targets."""
    prose = re.sub(r"```.*?```|<!--.*?-->", "", page, flags=re.DOTALL)
    prose = re.sub(r"\]\([^)]*\)", "]", prose).replace("<br>", "\n\n")
    prose = re.sub(r"^(?:\||#|!\[|:::|\s*options:).*$", "\n", prose, flags=re.MULTILINE)
    blocks = re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.) ", prose)
    joined = (" ".join(block.split()) for block in blocks)
    return [each for block in joined for each in re.split(r"(?<=[.!?:;])\**\s", block) if each]


def wide_cells() -> list[str]:
    """Return the table cells of docs/ that have more than 200 characters."""
    return [
        f"{path.relative_to(ROOT)}: {cell.strip()}"
        for path in files(("docs/**/*.md",))
        for line in path.read_text("utf-8").splitlines()
        if line.startswith("|")
        for cell in re.split(r"(?<!\\)\|", line)
        if len(cell.strip()) > MOST_CHARACTERS_OF_A_CELL
    ]


def fragments(patterns: tuple[str, ...]) -> list[str]:
    """Return the docstring summaries that begin with a word such as "What" or "Of", which makes them fragments."""
    begins = re.compile(r'^ *"""((?:What|Of|Whether|Where|Those|That|By|As)\b.*)', re.MULTILINE)
    found = ((path.relative_to(ROOT), begins.findall(path.read_text("utf-8"))) for path in files(patterns))
    return [f"{path}: {summary}" for path, summaries in found for summary in summaries]


def size(pattern: str, count: str) -> int:
    """Return the number of words or lines of the pages that match ``pattern``. ``count``: "words" or "lines"."""
    pages = [path.read_text("utf-8") for path in files((pattern,))]
    return sum(len(page.split()) if count == "words" else page.count("\n") for page in pages)


def measured() -> dict[str, int]:
    """Return today's counts by the names of CEILINGS."""
    counts = {f"{where}: {form}": 0 for where in ("pages", "code") for form in WORDS}
    for where, patterns in (("pages", PAGES), ("code", CODE)):
        for _, text in texts(patterns):
            for form, pattern in WORDS.items():
                counts[f"{where}: {form}"] += len(re.findall(pattern, text, re.IGNORECASE))
    counts["pages: sentences of over 25 words"] = len(long_sentences())
    counts["code: docstrings that are fragments"] = len(fragments(PYTHON))
    counts["tests: docstrings that are fragments"] = len(fragments(TESTS))
    counts["docs: table cells of over 200 characters"] = len(wide_cells())
    counts["docs: words"] = size("docs/**/*.md", "words")
    counts["README.md: words"] = size("README.md", "words")
    for page in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "docs/structure.md"):
        counts[f"{page}: lines"] = size(page, "lines")
    figures = (ROOT / "docs" / "performance.md").read_text("utf-8")
    counts["docs/performance.md: rows"] = len(re.findall(r"^\| (?!what )", figures, re.MULTILINE))
    return counts


def main(names: list[str]) -> int:
    """Print the counts above their ceilings and return 1 if there are any. With ``names``, print where they occur."""
    listed = {
        "pages: sentences of over 25 words": long_sentences,
        "code: docstrings that are fragments": lambda: fragments(PYTHON),
        "tests: docstrings that are fragments": lambda: fragments(TESTS),
        "docs: table cells of over 200 characters": wide_cells,
    }
    for name in names:
        print("\n".join(listed[name]() if name in listed else places(name)))
    if names:
        return 0
    counts = measured()
    above = [name for name, count in counts.items() if count > CEILINGS.get(name, 0)]
    for name in above:
        print(f"{name}: {counts[name]}, at most {CEILINGS.get(name, 0)}; python scripts/tidy.py '{name}' lists them")
    return bool(above)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
