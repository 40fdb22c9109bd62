"""``fastdecode launch``: starts a job on the hosts of a hostfile, or prints the commands for it."""

from __future__ import annotations

import argparse
import itertools
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastdecode.api.engine_fields import MAX_THREADS
from fastdecode.api.settings import parse_kv_cache_memory, parse_park, parse_prefill_workers
from fastdecode.cli import launch_lines as lines
from fastdecode.cli.flags import add_common_flags, model_words
from fastdecode.cli.launch_lines import HostSlots, read_hostfile, split_roles
from fastdecode.cli.words import dashed
from fastdecode.core.errors import ConfigError
from fastdecode.core.machine import usable_cores

FORMATS = ("openmpi", "mpich", "srun", "slurm", "ssh")


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "launch",
        help="start an S-worker and its R-workers on the hosts of a hostfile, or print the commands that would",
        description="The S-worker takes the first slot of the first host; every other slot runs an R-worker. Give a "
        "host one slot per NUMA node. The S-worker's command comes last, such as: bench throughput --model … If it has "
        "--prefill-workers mpi:N, the last N slots run prefill workers.",
    )
    parser.add_argument(
        "--hostfile", required=True, metavar="HOSTS", help="hostfile of Open MPI: a line `host slots=N` per host"
    )
    parser.add_argument("--print", action="store_true", help="print the commands and start nothing")
    parser.add_argument(
        "--format", choices=FORMATS, help="program whose commands to print (the installed mpirun's, else openmpi)"
    )
    parser.add_argument(
        "--kv-cache-memory", metavar="BYTES",
        help="memory of each R-worker's KV cache (the default of `fastdecode r-worker`)",
    )  # fmt: skip
    parser.add_argument("--threads", type=int, metavar="N", help="threads of each R-worker (one per core)")
    parser.add_argument("--park-dir", metavar="DIR", help="folder in which each R-worker stores unused prefixes (none)")
    parser.add_argument(
        "--park-after", type=float, metavar="SECONDS",
        help="seconds without use after which a prefix is stored in --park-dir (60)",
    )  # fmt: skip
    parser.add_argument(
        "--park-bytes", metavar="BYTES",
        help="most bytes that an R-worker stores in --park-dir (half of the free disk space)",
    )  # fmt: skip
    parser.add_argument(
        "--key-file", default="pool.key", metavar="FILE",
        help="file with the secret, the same on every host; for ssh and for prefill workers (pool.key)",
    )  # fmt: skip
    add_common_flags(parser)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="command of the S-worker (bench throughput)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the commands, or start the job and return its exit status.

    If the S-worker's flags have --help, print the help of the S-worker's command.
    """
    command, _ = _command(args)
    if {"-h", "--help"} & set(command):
        from fastdecode.cli.main import main

        return main(command)
    hosts = read_hostfile(args.hostfile)
    job = _job(args, hosts)
    found = None if args.print and args.format else find_mpiexec()
    form = args.format or (found.kind if found and found.kind in FORMATS else "openmpi")
    text = _text(form, job, hosts, args, "mpirun" if args.print or not found else shlex.quote(found.path))
    if args.print:
        print(text)
        return 0
    if form in ("slurm", "ssh"):
        raise ConfigError(f"format {form} is for a shell: give --print, and run what it prints")
    if form != "srun" and (not found or found.kind != form):
        raise ConfigError(f"no {form} mpirun was found here; pip install 'fastdecode[mpi]', or give --print")
    print(text, file=sys.stderr, flush=True)
    environment = os.environ | needed_environment()
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return subprocess.run(["sh", "-c", f"exec {text}"], env=environment, check=False).returncode


def _job(args: argparse.Namespace, hosts: list[HostSlots]) -> lines.JobShape:
    s_host, r_hosts = split_roles(hosts)
    command, rest = _command(args)
    if args.threads is not None and not 1 <= args.threads <= MAX_THREADS:
        raise ConfigError(f"threads must be from 1 to {MAX_THREADS}, not {args.threads}")
    if args.kv_cache_memory is not None:
        parse_kv_cache_memory(args.kv_cache_memory)
    if any(each.partition("=")[0] == "--r-workers" for each in (*command, *rest)):
        raise ConfigError("launch: --r-workers is what launch adds; leave it out of the S-worker's command")
    words, num_prefill_workers = _without_ranks(command)
    r_hosts, p_hosts = lines.take_last(r_hosts, num_prefill_workers)
    _check_parking(args, r_hosts)
    names = ("kv_cache_memory", "threads", "park_dir", "park_after", "park_bytes")
    given = ((f"--{name.replace('_', '-')}", getattr(args, name)) for name in names)
    r_flags = "".join(f" {flag} {shlex.quote(str(value))}" for flag, value in given if value is not None)
    return lines.JobShape(
        s_host,
        r_hosts,
        shlex.join(["fastdecode", *words]),
        r_flags,
        s_rest=_quoted(rest),
        p_hosts=p_hosts,
        p_flags=_quoted(model_words(words)) if p_hosts else "",
    )


def _check_parking(args: argparse.Namespace, r_hosts: Sequence[HostSlots]) -> None:
    """Raise ConfigError if two R-workers on one host of ``r_hosts`` would share the folder for parked KV caches."""
    parse_park(args.park_dir, args.park_after, args.park_bytes)
    twice = next((host for host in r_hosts if host.slots > 1), None)
    if args.park_dir is not None and twice:
        raise ConfigError(
            f"launch: park_dir: {twice.name} has {twice.slots} R-workers, and each needs a folder of its own: start "
            f"them with `fastdecode r-worker --park-dir`, or give one R-worker per host"
        )


def _command(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return the S-worker's command words in ``args`` before "--", and those from "--" on."""
    command = args.command[args.command[:1] == ["--"] :] or ["bench", "throughput"]
    end = command.index("--") if "--" in command else len(command)
    return [dashed(word) for word in command[:end]], command[end:]


def _without_ranks(words: list[str]) -> tuple[list[str], int]:
    """Return the S-worker's command ``words`` without ``--prefill-workers mpi:N``, and N (0 without that flag).

    Other prefill workers stay in the command.
    """
    for index, word in enumerate(words):
        flag, assigned, value = word.partition("=")
        if flag == "--prefill-workers":
            end = index + (1 if assigned else 2)
            spec = parse_prefill_workers(value if assigned else "".join(words[index + 1 : end]))
            return (words[:index] + words[end:], spec.count) if spec.kind == "mpi" else (words, 0)
    return words, 0


def _quoted(words: Sequence[str]) -> str:
    return "".join(f" {shlex.quote(word)}" for word in words)


def _text(form: str, job: lines.JobShape, hosts: list[HostSlots], args: argparse.Namespace, mpirun: str) -> str:
    key_file = shlex.quote(args.key_file)
    if form == "ssh":
        guard = _security(args.command)
        job = replace(job, r_flags=job.r_flags + guard, p_flags=job.p_flags + guard)
        remote = [f"ssh -n {host} {shlex.quote(command)} &" for host, command in lines.ssh_commands(job, key_file)]
        return "\n".join([*remote, lines.ssh_s_line(job, key_file)])
    if job.p_hosts and len({job.s_host, *(host.name for host in (*job.r_hosts, *job.p_hosts))}) > 1:
        job = replace(job, guard=f" --key-file {key_file}{_security(args.command)}")
    if form == "openmpi":
        prefix = "".join(f"{name}={value} " for name, value in needed_environment().items()) if args.print else ""
        return prefix + lines.openmpi_line(job, shlex.quote(args.hostfile), _oversubscribed(hosts), mpirun)
    if form == "mpich":
        return lines.mpich_line(job, "mpiexec" if mpirun == "mpirun" else mpirun)
    parts = [{job.s_host}, {host.name for host in job.r_hosts}, {host.name for host in job.p_hosts}]
    if twice := set.union(*(one & other for one, other in itertools.combinations(parts, 2))):
        raise ConfigError(
            f"hostfile: with Slurm, S-worker, R-workers and prefill workers need separate hosts: {min(twice)} has two "
            f"of these (the S-worker takes one slot of the first host)"
        )
    return lines.srun_line(job) if form == "srun" else lines.slurm_script(job)


def _security(command: Sequence[str]) -> str:
    """Return " --security LEVEL" as in the S-worker's ``command``, for R-workers; "" if ``command`` has no level."""
    words = [word for each in command for word in each.split("=", 1)]
    return f" --security {shlex.quote(words[words.index('--security') + 1])}" if "--security" in words[:-1] else ""


def _oversubscribed(hosts: list[HostSlots]) -> bool:
    """Return whether ``hosts`` put more processes on this machine than it has cores. Other hosts are not checked."""
    here = {"localhost", os.uname().nodename, os.uname().nodename.partition(".")[0]}
    return sum(host.slots for host in hosts if host.name in here) > len(usable_cores())


@dataclass(frozen=True)
class Mpiexec:
    """An installed mpiexec. ``kind``: "openmpi", "mpich" or "other"; ``version``: first line of ``--version``."""

    path: str
    kind: str
    version: str


def find_mpiexec() -> Mpiexec | None:
    """Return the mpiexec in the folder of this Python, else the first on PATH; None if neither exists."""
    folder = Path(sys.executable).parent
    for name in ("mpirun", "mpiexec"):
        path = shutil.which(name, path=str(folder)) or shutil.which(name)
        if path:
            return describe_mpiexec(path)
    return None


def needed_environment() -> dict[str, str]:
    """Return the environment variables that mpirun needs here; only root needs any."""
    # Environment without which Open MPI refuses to run as root
    root_environment = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return dict(root_environment) if os.geteuid() == 0 else {}


def describe_mpiexec(path: str) -> Mpiexec:
    """Run ``path --version`` and return which MPI this mpiexec belongs to."""
    version_seconds = 30
    try:
        command = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=version_seconds, check=False
        )
        lines = (command.stdout + command.stderr).strip().splitlines()
    except (OSError, subprocess.TimeoutExpired):
        lines = []
    text = " ".join(lines)
    kind = "openmpi" if "Open MPI" in text or "prrte" in text.lower() else "other"
    if "HYDRA" in text or "MPICH" in text:
        kind = "mpich"
    return Mpiexec(path, kind, lines[0].strip() if lines else "")
