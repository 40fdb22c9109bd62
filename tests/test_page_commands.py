"""Every command of README and first-steps runs unchanged, or with the smallest changes that WAYS names.

Models and ports are the tests' own (SMALL), and hosts are this one.
"""

from __future__ import annotations

import inspect
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from helpers.ports import free_port
from helpers.processes import PATIENCE_SECONDS
from helpers.r_workers import listening
from helpers.servers import CHAT_TEMPLATE, FASTDECODE, RunningServer, serving
from packaging.requirements import Requirement

from fastdecode.api.engine_fields import DEMO_MODEL
from fastdecode.cli.main import main

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "docs/first-steps.md")
SMALL = ["--device", "cpu", "--s-threads", "1", "--r-threads", "1", "--kv-cache-memory", "256MiB"]
UNREACHABLE = 69
"""The exit status of get-model without a package index."""

pytestmark = pytest.mark.xdist_group("page commands")


def commands(text: str) -> list[str]:
    """Return the commands of a page: lines of its shell blocks, and code in its prose that begins like one."""
    blocks = "\n".join(re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    lines = [re.sub(r"\s+# .*| &$", "", line).strip() for line in blocks.replace("\\\n", " ").splitlines()]
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    inline = re.findall(r"`((?:fastdecode|python|make|pip|docker) [^`]+)`", prose.replace("\n", " "))
    return [" ".join(line.split()) for line in [*lines, *inline] if line]


def programs(text: str) -> list[str]:
    """Return the Python blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def on_pages(found: Callable[[str], list[str]]) -> list[str]:
    """Return what is found on both pages, each once."""
    return list(dict.fromkeys(each for page in PAGES for each in found((ROOT / page).read_text("utf-8"))))


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder that get-model prints; without a package index, the demo model with a chat template."""
    done = subprocess.run([FASTDECODE, "get-model"], capture_output=True, text=True, timeout=250, check=False)
    if done.returncode == 0:
        return done.stdout.strip()
    assert done.returncode == UNREACHABLE, done.stderr
    folder = tmp_path_factory.mktemp("chat") / "demo"
    shutil.copytree(DEMO_MODEL, folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return str(folder)


def run(words: list[str], expected: str, statuses: tuple[int, ...] = (0,), **options: Any) -> None:
    """Run a process and look for a piece of its output."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False, **options)
    assert done.returncode in statuses and expected in done.stdout, f"{done.stdout}\n{done.stderr}"


def install(command: str, **_: Any) -> None:
    """Stand in for pip: the tests' environment is such an installation, and has all that the extra asks for."""
    extra = re.search(r"\[(\w+)\]", command)
    wanted = [Requirement(each) for each in metadata.requires("fastdecode") or []]
    chosen = [each for each in wanted if each.marker is None or each.marker.evaluate({"extra": extra[1]})]
    assert extra and chosen and all(metadata.version(each.name) in each.specifier for each in chosen)
    constraints = re.search(r"-c (\S+)", command)
    assert not constraints or (ROOT / constraints[1]).is_file()


def generate(command: str, chat_model: str, **_: Any) -> None:
    """Run the command on fewer threads and with fewer tokens."""
    words = shlex.split(command.replace("$(fastdecode get-model)", chat_model))
    assert words[0] == "fastdecode"
    asked = re.search(r'"(def [^"]*)"', command)
    run([FASTDECODE, *words[1:], *SMALL, "--max-model-len", "256", "--max-tokens", "8"], asked[1] if asked else "")


def get_model(chat_model: str, **_: Any) -> None:
    """The fixture has run it."""
    assert Path(chat_model, "config.json").is_file()


def planned(command: str, capsys: pytest.CaptureFixture[str], **_: Any) -> None:
    """Run the command unchanged, in this process."""
    assert main(shlex.split(command)[1:]) == 0
    assert "tokens" in capsys.readouterr().out


def plan_of_any(**_: Any) -> None:
    """Do nothing: the commands with flags are run."""


def doctor(**_: Any) -> None:
    """Run the command unchanged; the status is 1 where this machine lacks something."""
    run([FASTDECODE, "doctor"], "cores", (0, 1))


def gpu_report(**_: Any) -> None:
    """Stand in for a GPU: tests/test_gpu_kit.py runs this kit on a CPU."""
    target = (ROOT / "Makefile").read_text("utf-8").split("\ngpu-report:")[1].split("\n\n")[0]
    assert "-m gpu_kit" in target and (ROOT / "scripts" / "gpu_kit" / "__main__.py").is_file()
    assert "def test_the_kit_runs_on_a_cpu" in (ROOT / "tests" / "test_gpu_kit.py").read_text("utf-8")


def serve(command: str, chat_model: str, tmp_path: Path, **_: Any) -> None:
    """Run on a free port in place of 8000, and ask for a completion."""
    words = shlex.split(command.replace("$(fastdecode get-model)", chat_model))[2:]
    with serving(tmp_path, *without(words, "--port"), *SMALL, "--max-model-len", "256", is_bare=True) as server:
        assert completes(server)


def curl(command: str, chat_server: RunningServer, **_: Any) -> None:
    """Ask the tests' own server."""
    line = command.replace("http://127.0.0.1:8000", chat_server.url)
    run(shlex.split(line), '"text"')


def key(command: str, tmp_path: Path, **_: Any) -> None:
    """Run the command unchanged; R-workers accept no key that others can read."""
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True, timeout=PATIENCE_SECONDS)
    (made,) = tmp_path.iterdir()
    assert made.stat().st_mode & 0o077 == 0 and made.stat().st_size >= 32


def r_worker(command: str, key_file: Path, **_: Any) -> None:
    """Listen at a free port in place of 5580, on loopback where the page names another host."""
    words = shlex.split(command)
    place = words[words.index("--listen") + 1]
    host = "*" if "*" in place else "127.0.0.1"
    with listening("--key-file", str(key_file), listen=f"tcp://{host}:{free_port()}") as (process, _address):
        assert process.poll() is None


def serve_hosts(command: str, key_file: Path, tmp_path: Path, **_: Any) -> None:
    """Two R-workers of this machine stand in for two hosts, and the demo model for MODEL."""
    words = shlex.split(command)[2:]
    with listening("--key-file", str(key_file)) as (_, one), listening("--key-file", str(key_file)) as (_, two):
        flags = ["--r-workers", f"{one},{two}", "--key-file", str(key_file)]
        assert set(words[::2]) == {*flags[::2], *({"--model"} if "MODEL" in words else ())}
        with serving(tmp_path, *flags, "--max-model-len", "256", is_bare=True) as server:
            assert completes(server)


def by_ci(**_: Any) -> None:
    """Continuous integration runs `make test`, and a person `make demo`; both would take minutes here."""
    assert re.search(r"^demo: .*\n", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert "make test" in (ROOT / ".ci" / "run").read_text("utf-8")


def completes(server: RunningServer) -> bool:
    """Return whether the server answers a completion."""
    asked = {"prompt": "def read(self):", "max_tokens": 4, "temperature": 0}
    status, body = server.request("/v1/completions", asked)
    return status == 200 and bool(body["choices"][0]["text"])


def without(words: list[str], flag: str) -> list[str]:
    """Return words without a flag and its value."""
    place = words.index(flag) if flag in words else len(words)
    return words[:place] + words[place + 2 :]


WAYS: dict[str, Callable[..., None]] = {
    r"pip install .*": install,
    r"fastdecode doctor": doctor,
    r"fastdecode get-model": get_model,
    r"fastdecode generate": get_model,
    r"fastdecode generate .*": generate,
    r"fastdecode plan": plan_of_any,
    r"fastdecode plan .*": planned,
    r"fastdecode serve .*--r-workers [\w.]+:\d+,.*": serve_hosts,
    r"fastdecode serve .*": serve,
    r"fastdecode r-worker .*": r_worker,
    r"\(?(?:umask|openssl) .*": key,
    r"curl .*": curl,
    r"make gpu-report": gpu_report,
    r"make (?:demo|test)": by_ci,
}
"""How a command is run: the first pattern that matches the whole of it."""


def way(command: str) -> Callable[..., None] | None:
    """Return how a command is run; None for one that nobody has thought of."""
    return next((found for pattern, found in WAYS.items() if re.fullmatch(pattern, command)), None)


def test_every_command_has_a_way() -> None:
    assert len(on_pages(commands)) >= 15
    assert [command for command in on_pages(commands) if way(command) is None] == []


def test_commands_are_found() -> None:
    page = "Say `make it so`.\n\n```sh\nfastdecode serve --a 1 \\\n  --b 2   # why\n\nssh x &\n```\n`no command`\n"
    assert commands(page) == ["fastdecode serve --a 1 --b 2", "ssh x", "make it so"]
    assert way("ssh x") is None


@pytest.fixture
def asked(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """Yield the fixtures that a command's function takes, made only for those that take them."""
    found = way(request.node.callspec.params["command"])
    names = inspect.signature(found).parameters if found else ()
    known = ("chat_model", "chat_server", "key_file", "tmp_path", "capsys")
    yield {name: request.getfixturevalue(name) for name in known if name in names}


@pytest.mark.slow
@pytest.mark.parametrize("command", on_pages(commands), ids=lambda line: re.sub(r"\W+", "-", line)[:64])
def test_a_command_runs(command: str, asked: dict[str, Any]) -> None:
    found = way(command)
    assert found
    found(command=command, **asked)


@pytest.mark.slow
@pytest.mark.parametrize("program", on_pages(programs), ids=["README", "first-steps"])
def test_a_program_runs(program: str, chat_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each program runs with a model's folder for "…", on fewer threads and with fewer tokens."""
    small = "LLM(device='cpu', s_threads=1, r_threads=1, kv_cache_memory='256MiB', max_model_len=256, "
    text = program.replace("…", chat_model).replace("LLM(", small, 1)
    text = re.sub(r"max_tokens=\d+", "max_tokens=4", text)
    assert small in text and "max_tokens=4" in text
    exec(compile(text, "the page's program", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()


def test_the_readme_s_table_is_what_plan_says(tmp_path: Path) -> None:
    """A change of plans has to update the README's first table."""
    readme = (ROOT / "README.md").read_text("utf-8")
    card = ["--gpu", "rtx-4090", "--cpu", "ryzen-9950x", "--prompt-len", "122880", "--seq-len", "131072"]
    home = planned_json([*card, "--tpot", "400"], tmp_path)
    assert home["gpu_only"]["max_batch_size"] == 0
    speed = home["output_tokens_per_second"]
    assert f"of 128K tokens, which the card alone cannot hold, at {speed:.0f} tokens/s" in readme
    hosts = ["--gpu", "a100", "--cpu", "epyc-9654", "--link", "100Gb", "--prompt-len", "14336", "--seq-len", "16384"]
    plan = planned_json([*hosts, "--tpot", "200"], tmp_path)
    alone = plan["gpu_only"]
    ratio = plan["output_tokens_per_second"] / alone["output_tokens_per_second"]
    counts = (
        f"{plan['users']} users of 16K tokens in place of {alone['max_batch_size']}, and {ratio:.1f} × the tokens/s"
    )
    assert counts in readme and plan["num_hosts"] == 6


def planned_json(words: list[str], folder: Path) -> dict[str, Any]:
    """Return the figures of a plan of Llama-3-8B."""
    file = folder / "plan.json"
    assert main(["plan", "--model", "llama-3-8b", *words, "--output-json", str(file)]) == 0
    return dict(json.loads(file.read_text("utf-8")))
