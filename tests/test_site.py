"""The site (`make site`) agrees with the planner, the flags, the links and the messages."""

from __future__ import annotations

import argparse
import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fastdecode.cli.main import COMMANDS, main

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import cli_pages  # noqa: E402
import plan_tables  # noqa: E402
import site_pages  # noqa: E402

CALCULATOR = ROOT / "docs" / "assets" / "calculator.js"

CHOICES = [
    ("llama-3-8b", ("rtx-5090", "ryzen-9950x", "gguf-q4_k_m", 32768, "100")),
    ("llama-3.3-70b", ("h100", "epyc-9654", "plain", 131072, "300")),
    ("llama-7b", ("a100", "epyc-9654", "plain", 131072, "inf")),
    ("deepseek-v3", ("h200", "xeon-8480", "plain", 32768, "100")),
]
"""A desktop with packed weights, ranks, sequences in ranges, and latents on many ranks: plans with different code."""


@pytest.mark.parametrize(("model", "values"), CHOICES)
def test_the_table_is_the_planner_s(model: str, values: tuple[str | int, ...], tmp_path: Path) -> None:
    choice = dict(zip(plan_tables.AXES, values, strict=True))
    entry = plan_tables.entry(model, choice)
    assert main([*plan_tables.flags(model, choice, entry["ranks"]), "--output-json", str(tmp_path / "plan.json")]) == 0
    plan = json.loads((tmp_path / "plan.json").read_text("utf-8"))
    for name in ("mini_batch_size", "in_flight", "num_r_workers", "total_r_workers", "num_hosts", "bottleneck"):
        assert entry[name] == plan[name]
    assert (entry["use_fastdecode"], entry["verdict"]) == (plan["use_fastdecode"], plan["verdict"])
    assert entry["tokens_per_second"] == pytest.approx(plan["output_tokens_per_second"], rel=1e-3)
    assert entry["step_ms"] == pytest.approx(plan["step_seconds"] * 1e3, rel=1e-3)
    assert entry["alone"] == pytest.approx(plan["gpu_only"]["output_tokens_per_second"], rel=1e-3)
    assert entry["users"] == plan["users"] and entry["tpot_ms"] == pytest.approx(plan["tpot_seconds"] * 1e3, rel=1e-3)
    if entry["alone_batch"]:
        assert entry["alone_tpot_ms"] == pytest.approx(plan["gpu_only"]["tpot_seconds"] * 1e3, rel=1e-3)
    assert entry["kv_shard_tokens"] == plan["ranges"]["kv_shard_tokens"]
    assert [row[0] for row in entry["candidates"]] == [row["num_r_workers"] for row in plan["candidates"]]


def test_a_plan_that_cannot_be_says_why() -> None:
    choice = dict(zip(plan_tables.AXES, ("rtx-4090", "epyc-9654", "plain", 4096, "100"), strict=True))
    entry = plan_tables.entry("deepseek-v3", choice)
    assert entry["ranks"] == plan_tables.MOST_RANKS and "weights" in entry["reason"]


@pytest.mark.skipif(shutil.which("node") is None, reason="no node here to run the calculator's script")
def test_the_page_looks_entries_up_where_they_lie() -> None:
    """Every cell of a small table, the command line of the test's own plans, and a price are looked up right."""
    axes = {"gpu": ["a10", "h100"], "seq_len": [1024, 4096, 16384], "prompt_eighths": [1, 7]}
    combinations = [dict(zip(axes, each, strict=True)) for each in itertools.product(*axes.values())]
    model, values = CHOICES[1]
    chosen = {"model": model} | dict(zip(plan_tables.AXES, values, strict=True))
    script = f"""
      const {{ place, commandLine, price }} = require({json.dumps(str(CALCULATOR))});
      const places = {json.dumps(combinations)}.map((chosen) => place({json.dumps(axes)}, chosen));
      const paid = price({{ gpu_price: 2, cpu_price: 0.5 }}, 4, 6, 1000);
      console.log(JSON.stringify([places, commandLine({json.dumps(chosen)}, 2), paid]));"""
    output = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True, timeout=60).stdout
    places, line, paid = json.loads(output)
    assert places == list(range(len(combinations)))
    words = plan_tables.flags(model, dict(zip(plan_tables.AXES, values, strict=True)), 2)
    assert sorted(line.split()) == sorted(["fastdecode", *words])
    assert paid == pytest.approx((4 * 2 + 6 * 0.5) / 3600 / 1000 * 1e6)


def test_the_command_line_s_pages_have_every_flag() -> None:
    pages = cli_pages.pages()
    for command in COMMANDS:
        page, parser = pages[cli_pages.file_name(command)], cli_pages.parser_of(command)
        assert page.startswith(f"# fastdecode {command}\n") and command in pages["index.md"]
        for flag, action in parser._option_string_actions.items():
            assert f"`{flag}" in page or action.help == argparse.SUPPRESS


def test_a_script_s_page_has_all_its_code() -> None:
    for place in site_pages.SCRIPTS:
        script = (ROOT / place).read_text("utf-8")
        page = site_pages.script_page(script)
        code = "\n".join(re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
        wanted = script.split("import annotations\n")[1]
        assert [line for line in code.splitlines() if line] == [
            line for line in wanted.splitlines() if line and not line.startswith("# %%")
        ]


def test_links_between_pages_lead_somewhere() -> None:
    """``make site`` checks anchors, too."""
    pages = [each.relative_to(ROOT / "docs").as_posix() for each in (ROOT / "docs").rglob("*.md")]
    sources = site_pages.PAGES | {f"docs/{page}": page for page in pages}
    for place, uri in sources.items():
        text = site_pages.relinked((ROOT / place).read_text("utf-8"), uri)
        for target in (match[2] for match in site_pages.LINK.finditer(text)):
            there = (Path("/site", uri).parent / target).as_posix()
            page = Path(there).resolve().relative_to("/site").as_posix()
            known = page in {*sources.values(), *site_pages.GENERATED.values()} or page.startswith("cli/")
            known = known or (ROOT / "docs" / page).is_file()
            assert known, f"{place}: {target}"


def anchors(page: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them of plain words."""
    prose = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    titles = (title.lower() for title in re.findall(r"^#+ (.*)$", prose, re.MULTILINE))
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip()) for title in titles}


def test_anchors_of_links_are_headings() -> None:
    pages = [*(ROOT / place for place in site_pages.PAGES), *(ROOT / "docs").rglob("*.md")]
    wrong = [
        f"{page.name}: {target}#{anchor}"
        for page in pages
        for target, anchor in re.findall(r"\]\(([^)\s#:]*)#([^)\s]+)\)", page.read_text("utf-8"))
        if anchor not in anchors((page.parent / target if target else page).read_text("utf-8"))
    ]
    assert wrong == []


def test_messages_of_the_errors_page_are_the_program_s() -> None:
    """Each piece between two … stands in its source, where texts over several lines are joined."""
    page = (ROOT / "docs" / "errors.md").read_text("utf-8")
    folders = (ROOT / name for name in ("fastdecode", "sworker", "cluster", "perfmodel"))
    sources = (each.read_text("utf-8") for folder in folders for each in folder.rglob("*.py"))
    program = "\n".join(re.sub(r'"\s*\n\s*f?"', "", text) for text in sources)
    assert not re.search(r"^\| message", page, re.MULTILINE)
    messages = re.findall(r"^- `([^`]*)`: .*$", page, re.MULTILINE)
    assert len(messages) > 60
    for message in messages:
        lost = [piece for piece in message.split("…") if piece.strip() not in program]
        assert not lost, f"{message}: {lost}"


def test_the_front_page_has_three_paths() -> None:
    """The first two paths show figures of the README's table."""
    readme = (ROOT / "README.md").read_text("utf-8")
    page = site_pages.front_page(readme)
    assert page.count("\n-   **") == 3 and "| you have |" not in page
    assert "128K tokens" in page and "## Several hosts" in page
