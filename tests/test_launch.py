"""``fastdecode launch``: hostfiles, the lines for every launcher, and a job that these lines start."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from helpers import mpi_jobs, r_workers

from fastdecode.cli.launch import FORMATS
from fastdecode.cli.launch_lines import HostSlots, read_hostfile, split_roles
from fastdecode.cli.main import main
from fastdecode.core.errors import ConfigError
from fastdecode.core.machine import usable_cores

pytestmark = pytest.mark.slow

HOSTS = """
# the GPU's host, then the others
gpu-1 slots=1
node.a slots = 2   # two NUMA nodes
node-b
"""
S_COMMAND = ["bench", "throughput", "--model", "a model"]


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    return write(tmp_path, HOSTS)


def write(folder: Path, text: str) -> Path:
    path = folder / "hosts"
    path.write_text(text)
    return path


def printed(capsys: pytest.CaptureFixture[str], hostfile: Path, form: str, *arguments: str) -> str:
    assert main(["launch", "--hostfile", str(hostfile), "--print", "--format", form, *arguments]) == 0
    return capsys.readouterr().out


def test_a_hostfile_is_read(hostfile: Path) -> None:
    hosts = read_hostfile(str(hostfile))
    assert hosts == [HostSlots("gpu-1", 1), HostSlots("node.a", 2), HostSlots("node-b", 1)]
    assert split_roles(hosts) == ("gpu-1", tuple(hosts[1:]))
    assert split_roles([HostSlots("one", 3)]) == ("one", (HostSlots("one", 2),))


def test_every_bad_line_is_one_sentence(tmp_path: Path) -> None:
    path = write(tmp_path, "a slots=0\nb slots=2\n-rf slots=1\nb slots=1\nc; rm slots=2\nd slots=x\n")
    with pytest.raises(ConfigError) as caught:
        read_hostfile(str(path))
    problems = str(caught.value).removeprefix("hostfile: ").split("; " + str(path))
    assert [re.search(r":(\d+): ", problem).group(1) for problem in problems] == list("13456")  # type: ignore[union-attr]
    assert "slots must be 1 to 4096, not 0" in problems[0] and "b was named before" in problems[2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no host"),
        ("# nothing\n", "names no host"),
        ("alone\n", "alone has one slot, which the S-worker takes"),
    ],
)
def test_too_few_hosts_are_said(text: str, message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--hostfile", str(write(tmp_path, text)), "--print"]) == 2
    assert message in capfd.readouterr().err


@pytest.mark.parametrize("form", FORMATS)
def test_lines_are_shell_and_hold_the_job(form: str, hostfile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three R-workers run on two hosts, and the flags of both sides are where they belong."""
    text = printed(capsys, hostfile, form, "--kv-cache-memory", "4GiB", *S_COMMAND)
    script = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert script.returncode == 0, script.stderr
    words = shlex.split(text.replace("\\\n", ""), comments=True)
    assert "a model" in words and "gpu-1" not in " ".join(words[-3:])
    if form == "ssh":
        assert [words[i + 2] for i, word in enumerate(words) if word == "ssh"] == ["node.a", "node.a", "node-b"]
        assert "node.a:5580,node.a:5581,node-b:5580" in words
        assert text.count("--kv-cache-memory 4GiB") == 3
    else:
        assert text.rstrip().endswith("fastdecode r-worker --transport mpi --kv-cache-memory 4GiB")
        assert text.count("--r-workers mpi") == 1
        assert "-n 3 fastdecode" in text or "--nodes=2 --ntasks=3" in text


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("given", [["--prefill-workers", "mpi:1"], ["--prefill-workers=mpi:1"]])
def test_the_last_slots_are_prefill_workers(
    form: str, given: list[str], hostfile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prefill workers get the S-worker's model flags, and every rank the key, since rows leave their machines."""
    more = ["--dtype=bfloat16", "--num-prompts", "4", "--enforce-eager", "--tokenizer", "t", "--", "-x"]
    text = printed(capsys, hostfile, form, *S_COMMAND, *given, *more)
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    words = shlex.split(text.replace("\\\n", ""), comments=True)
    model = ["--model", "a model", "--dtype=bfloat16", "--enforce-eager"]
    if form == "ssh":
        command = words[words.index("node-b") + 1]
        expected = ["fastdecode", "prefill-worker", "--listen", "tcp://*:9700", "--key-file", "pool.key", *model]
        assert shlex.split(command) == expected
        assert text.endswith(
            "--r-workers node.a:5580,node.a:5581 --prefill-workers node-b:9700 --key-file pool.key -- -x\n"
        )
        return
    start = words.index("prefill-worker")
    assert words[start:] == ["prefill-worker", "--transport", "mpi", *model, "--key-file", "pool.key"]
    assert "--r-workers mpi --prefill-workers mpi:1 --key-file pool.key -- -x" in text
    assert "fastdecode r-worker --transport mpi --key-file pool.key" in text
    assert ("-n 2 fastdecode r-worker" in text and "-n 1 fastdecode prefill-worker" in text) or (
        "--nodes=1 --ntasks=2 --nodelist=node.a" in text and "--nodes=1 --ntasks=1 --nodelist=node-b" in text
    )


def test_prefill_workers_elsewhere_are_left_as_they_are(hostfile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, hostfile, "openmpi", *S_COMMAND, "--prefill-workers", "spawn:1")
    assert "--prefill-workers spawn:1 --r-workers mpi" in text and "prefill-worker " not in text


@pytest.mark.parametrize("words", [["bench", "throughput", "--help"], ["--", "bench", "throughput", "-h"]])
def test_help_is_the_commands_and_starts_nothing(
    words: list[str], hostfile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["launch", "--hostfile", str(hostfile), *words])
    assert ended.value.code == 0 and "usage: fastdecode bench throughput" in capsys.readouterr().out


def test_what_looks_like_a_flag_stays_a_prompt(hostfile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, hostfile, "openmpi", "--", "generate", "--max-tokens", "2", "--", "-x prompt")
    assert "fastdecode generate --max-tokens 2 --r-workers mpi -- '-x prompt' " in text


@pytest.mark.parametrize("given", [["--security", "authenticate"], ["--security=authenticate"]])
def test_both_sides_get_the_same_security(given: list[str], hostfile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--hostfile", str(hostfile), "--print", "--format", "ssh", "bench", "throughput", *given]
    assert main(["launch", *arguments]) == 0
    *remote, s_line = capsys.readouterr().out.splitlines()
    assert len(remote) == 3 and all("--security authenticate" in line for line in remote)
    assert " ".join(given) in s_line


def test_r_workers_are_told_where_to_park(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = write(tmp_path, "a\nb\nc")
    given = ["--park-dir", "/a disk", "--park-bytes", "1TiB", "--park-after", "9"]
    text = printed(capsys, hosts, "ssh", *given, *S_COMMAND)
    commands = [shlex.split(line)[3] for line in text.splitlines() if line.startswith("ssh")]
    flags = "--park-dir '/a disk' --park-after 9.0 --park-bytes 1TiB"
    assert len(commands) == 2 and all(flags in command for command in commands)


def test_root_is_told_to_open_mpi_and_nobody_else(hostfile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, hostfile, "openmpi")
    assert text.startswith("OMPI_ALLOW_RUN_AS_ROOT=1 " if os.geteuid() == 0 else "mpirun ")
    assert "--bind-to numa" in text
    assert printed(capsys, hostfile, "mpich").startswith("mpiexec -hosts gpu-1:1,node.a:2,node-b:1 -bind-to numa -n 1 ")


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("a slots=2", ["--print", "--format", "slurm"], "a has two of these"),
        (HOSTS, ["--format", "slurm"], "format slurm is for a shell: give --print"),
        (HOSTS, ["--print", "--threads", "0"], "threads must be from 1 to 1024, not 0"),
        (HOSTS, ["--print", "--kv-cache-memory", "banana"], "kv_cache_memory must be a positive number of bytes"),
        ("a\nb slots=2", ["--print", "--park-dir", "/parked"], "park_dir: b has 2 R-workers, and each needs a folder"),
        ("a\nb", ["--print", "--park-after", "5"], "park_after: there is no folder to park in"),
        (HOSTS, ["--print", "generate", "--r-workers", "mpi"], "--r-workers is what launch adds"),
        (HOSTS, ["--print", "generate", "--prefill-workers", "mpi:3"], "none is left for R-workers"),
        (HOSTS, ["--print", "generate", "--prefill-workers"], "prefill_workers must be spawn:N, mpi:N"),
        (
            "a\nb slots=2",
            ["--print", "--format", "srun", "x", "--prefill-workers=mpi:1"],
            "b has two of these",
        ),
    ],
)
def test_what_cannot_work_is_said(
    text: str, arguments: list[str], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "--hostfile", str(write(tmp_path, text)), *arguments]) == 2
    assert message in capfd.readouterr().err


@pytest.mark.parametrize(
    "prefill_workers",
    [
        pytest.param([], id="no-prefill"),
        pytest.param(["--prefill-workers", "mpi:1"], marks=pytest.mark.thorough, id="prefill"),
    ],
)
def test_it_starts_the_job(prefill_workers: list[str], tmp_path: Path) -> None:
    """The job runs on this machine, with more processes than cores and no settings from outside."""
    slots = len(usable_cores()) + 1
    hosts = write(tmp_path, f"localhost slots={slots}\n")
    small = ["--max-model-len", "64", "--num-prompts", "2", "--random-input-len", "8", "--random-output-len", "4"]
    flags = ["--hostfile", str(hosts), *r_workers.SMALL, "bench", "throughput", *small, *prefill_workers]
    job = subprocess.run(
        [r_workers.FASTDECODE, "launch", *flags],
        capture_output=True,
        text=True,
        timeout=mpi_jobs.PATIENCE_SECONDS,
        check=False,
        cwd=tmp_path,
    )
    assert job.returncode == 0, job.stdout + job.stderr
    assert f"{slots - 1 - bool(prefill_workers)} R-worker(s) of 1 thread(s)" in job.stdout
    assert job.stdout.count("fastdecode prefill-worker: MPI rank") == bool(prefill_workers)
