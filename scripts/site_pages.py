"""A MkDocs hook, named in mkdocs.yml, that adds pages from outside docs/ to the site.

It adds the repository's other Markdown files, the command line's reference and the calculator's tables. Links between
Markdown files of the repository become links between pages of the site.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(Path(__file__).parent))

import cli_pages  # noqa: E402
import features  # noqa: E402
import ledger  # noqa: E402
import plan_tables  # noqa: E402
import vllm_table  # noqa: E402

PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "examples/kubernetes/README.md": "examples/kubernetes.md",
    "examples/ray/README.md": "examples/ray.md",
}
"""Files of the repository beside docs/ that are pages, and where they are on the site."""

GENERATED = {"docs/ledger/measured.json": "ledger.md", "docs/ledger/tried.json": "ledger.md"}
"""Data of pages that only the site has."""

SCRIPTS = {
    f"examples/{name}.py": f"examples/{name}.md" for name in ("three_r_workers", "spot_hosts", "shared_documents")
}
"""Examples in cells that are also pages."""

LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(?=\))")


def on_config(config: Any) -> Any:
    """Add the pages of all commands to the navigation, below the commands' index."""
    commands = [{name: f"cli/{cli_pages.file_name(name)}"} for name in cli_pages.COMMANDS]
    reference = next(section["Reference"] for section in config.nav if "Reference" in section)
    reference[0] = {"Command line": ["cli/index.md", *commands]}
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the files that are not in docs/."""
    from mkdocs.structure.files import File

    made = {site: (ROOT / place).read_text("utf-8") for place, site in PAGES.items()}
    made["index.md"] = front_page(made["index.md"])
    made |= {site: script_page((ROOT / place).read_text("utf-8")) for place, site in SCRIPTS.items()}
    made |= {f"cli/{name}": text for name, text in cli_pages.pages().items()}
    made["vllm.md"] = vllm_table.full()
    made["chaos.md"] = features.matrix()
    made["ledger.md"] = ledger.rendered(ROOT / "docs" / "ledger")
    made |= {f"plans/{name}": script for name, script in plan_tables.tables().items()}
    for name, content in made.items():
        files.append(File.generated(config, name, content=content))
    return files


CARDS = """<div class="grid cards" markdown>

-   **At home: one GPU card**

    ---

    Conversations that your card cannot hold, in your host's memory. Planned for an RTX 4090: {home}.

    [Does it pay on my machine?](docs/calculator.md) · [First steps](docs/first-steps.md)

-   **Operator: vLLM and spare CPU hosts**

    ---

    More users on the same GPUs. Planned for an A100 and six EPYC hosts: {operator}.

    [Serving](docs/serving.md) · [vLLM's flags](docs/api.md#coming-from-vllm) · [Reliability](docs/reliability.md)

-   **Researcher: the paper, arXiv 2403.11421**

    ---

    The pipeline, the schedule and the equations of the paper, as tested code.

    [One token's tour](docs/tour.md) · [Structure](docs/structure.md) · [Equations](docs/planning.md#the-equations)

</div>
"""
"""The three paths of the front page; what is planned for the first two stands in the README's table."""

FRONT_HEAD = """---
hide: [navigation, toc]
---

"""


def front_page(readme: str) -> str:
    """Return the site's front page: the README, with three cards in place of its first table."""
    rows = re.findall(r"^\| (?:one|an) .*? \| (.*?) \| .* \|$", readme, re.MULTILINE)
    home, operator = rows
    table = re.search(r"^\| you have \|.*?\n\n", readme, re.MULTILINE | re.DOTALL)
    assert table
    cards = CARDS.format(home=home, operator=operator)
    return FRONT_HEAD + readme.replace(table[0], cards + "\n", 1)


def script_page(script: str) -> str:
    """Return a page for a script with cells: its docstring, and each cell's first line as text above its code."""
    _, docstring, code = script.split('"""', 2)
    title, _, rest = docstring.partition("\n")
    heading, _, command = title.rpartition(": ")
    blocks = [f"# {heading}", f"`{command}`", rest.strip()]
    for cell in code.split("\n# %% ")[1:]:
        text, _, lines = cell.partition("\n")
        blocks += [text, f"```python\n{lines.strip()}\n```"]
    return "\n\n".join(blocks) + "\n"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn links between files into links between pages."""
    return relinked(markdown, page.file.src_uri)


def relinked(markdown: str, site_uri: str) -> str:
    """Return the text of the page at ``site_uri``; links to files of the repository become links of the site."""
    sources = {site: place for place, site in PAGES.items()}
    folder = posixpath.dirname(sources.get(site_uri, f"docs/{site_uri}"))

    def link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[2]))
        there = (PAGES | GENERATED).get(target, target.removeprefix("docs/") if target.startswith("docs/") else None)
        if there is None:
            return match[0]
        return f"{match[1]}{posixpath.relpath(there, posixpath.dirname(site_uri) or '.')}{match[3] or ''}"

    return LINK.sub(link, markdown)
