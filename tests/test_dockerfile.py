"""The Dockerfile, read without docker: its stages, what it copies and leaves out, and what it starts."""

from __future__ import annotations

import fnmatch
import re
import shlex
from pathlib import Path

import pytest
from helpers import kubernetes

tomllib = pytest.importorskip("tomllib")  # tomllib comes with Python 3.11.

ROOT = Path(__file__).parents[1]
Instruction = tuple[str, str]


@pytest.fixture(scope="module")
def instructions() -> list[Instruction]:
    """Return the Dockerfile's instructions, each with its arguments."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines]


def arguments(instructions: list[Instruction], name: str) -> list[str]:
    return [value for each, value in instructions if each == name]


def test_stages_of_one_pinned_base(instructions: list[Instruction]) -> None:
    """R-workers have an image of their own, and a build without a target makes the whole one."""
    python = "python:${PYTHON}-slim"
    stages = [f"{python} AS build", f"{python} AS base", "base AS r-worker", "base"]
    assert arguments(instructions, "FROM") == stages
    defaults = dict(value.partition("=")[::2] for value in arguments(instructions, "ARG"))
    version = tuple(map(int, defaults["PYTHON"].split(".")))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert version >= tuple(map(int, project["requires-python"].removeprefix(">=").split(".")))
    assert defaults["TORCH_INDEX"].endswith("/whl/cpu"), "CUDA is asked for"
    assert set(defaults["EXTRAS"].split(",")) <= set(project["optional-dependencies"])
    used = " ".join(value for name, value in instructions if name in ("RUN", "FROM"))
    assert all(f"${{{name}}}" in used for name in ("PYTHON", "TORCH_INDEX", "EXTRAS"))


def test_sources_are_there_and_reach_the_build(instructions: list[Instruction]) -> None:
    """The wheel has all its sources, and links lead to what was copied."""
    copied = [shlex.split(value) for value in arguments(instructions, "COPY")]
    sources = [source for *several, _ in copied for source in several]
    for source in sources:
        assert (ROOT / source).exists() and not is_ignored(source), source
    for link in (each for each in (ROOT / "fastdecode").rglob("*") if each.is_symlink()):
        target = link.resolve().relative_to(ROOT)
        assert any(target.is_relative_to(source) for source in sources), f"{link} leads to {target}"
    assert arguments(instructions, "ADD") == []


def is_ignored(path: str) -> bool:
    """Return whether .dockerignore excludes ``path``: the last pattern that fits decides."""
    ignored = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#"):
            pattern = line.removeprefix("!").removeprefix("**/")
            parts = [path, *map(str, Path(path).parents)]
            name = path if line.startswith("!") or line == "*" else Path(path).name
            if any(fnmatch.fnmatch(each, pattern) for each in (name, *parts)):
                ignored = not line.startswith("!")
    return ignored


@pytest.mark.parametrize("path", ["pool.key", "cluster/pool.key", ".env", ".git/config", ".venv/bin/python", "out/x"])
def test_nothing_else_reaches_the_build(path: str) -> None:
    assert is_ignored(path)


def test_what_runs_is_the_program_as_a_user_without_rights(instructions: list[Instruction]) -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert [value.strip('["]') for value in arguments(instructions, "ENTRYPOINT")] == list(scripts)
    user, other = arguments(instructions, "USER")
    assert user == other
    stages = "\n".join(name for name, _ in instructions).split("FROM\n")
    assert all("RUN" not in stage.partition("USER")[2] for stage in stages if "USER" in stage)
    assert "USER" in stages[-1] and "USER" in stages[-2]
    for template in kubernetes.pods(kubernetes.base()).values():
        context = template["spec"]["securityContext"]
        assert f"{context['runAsUser']}:{context['runAsGroup']}" == user
        for container in template["spec"]["containers"]:
            assert "command" not in container, "the image's entrypoint takes the arguments"
            exposed = set(map(int, arguments(instructions, "EXPOSE")[-1].split()))
            assert {port["containerPort"] for port in container["ports"]} <= exposed
            mounts = {each["mountPath"] for each in container["volumeMounts"]}
            home = re.search(r"HOME=(\S+) XDG_CACHE_HOME=(\S+)", " ".join(arguments(instructions, "ENV")))
            assert home and home[1] in mounts and home[2].startswith(home[1]), "what is written goes to a volume"


def test_no_secrets(instructions: list[Instruction]) -> None:
    names = " ".join(arguments(instructions, "ARG") + arguments(instructions, "ENV")).lower()
    assert not re.search(r"token|password|secret|api_key|credential", names)
