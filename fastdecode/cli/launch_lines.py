"""Reads a job's hosts from a hostfile and builds the commands that start the job: mpirun, srun, sbatch, Ray, ssh."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fastdecode.core.errors import ConfigError

_LINE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:\s+slots\s*=\s*(\d{1,5}))?")


@dataclass(frozen=True)
class HostSlots:
    """A host of a hostfile. ``slots``: the number of processes to run on it."""

    name: str
    slots: int

    def __str__(self) -> str:
        return f"{self.name} slots={self.slots}"


def read_hostfile(path: str) -> list[HostSlots]:
    """Return the hosts in the hostfile at ``path``, in order. A ConfigError has one sentence per bad line."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"hostfile: cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    hosts: list[HostSlots] = []
    problems: list[str] = []
    for number, line in _lines(text):
        try:
            host = _host(line)
            if host.name in {each.name for each in hosts}:
                raise ConfigError(f"{host.name} was named before; give it all its slots at once")
            hosts.append(host)
        except ConfigError as error:
            problems.append(f"{path}:{number}: {error}")
    if problems:
        raise ConfigError("hostfile: " + "; ".join(problems))
    if not hosts:
        raise ConfigError(f"hostfile: {path} names no host; a line is such as `node1 slots=2`")
    return hosts


def split_roles(hosts: Sequence[HostSlots]) -> tuple[str, tuple[HostSlots, ...]]:
    """Split ``hosts`` into the S-worker's host (one slot of the first host) and the R-workers' hosts (other slots)."""
    first, *others = hosts
    left = [HostSlots(first.name, first.slots - 1)] if first.slots > 1 else []
    if not left and not others:
        raise ConfigError(f"hostfile: {first.name} has one slot, which the S-worker takes: add hosts for R-workers")
    return first.name, (*left, *others)


def take_last(hosts: Sequence[HostSlots], count: int) -> tuple[tuple[HostSlots, ...], tuple[HostSlots, ...]]:
    """Split ``hosts`` into R-workers' hosts and prefill workers' hosts; the latter are the last ``count`` slots."""
    num_slots = sum(host.slots for host in hosts)
    if count >= num_slots:
        raise ConfigError(
            f"hostfile: it has {num_slots} slot(s) beside the S-worker's, and {count} prefill workers take them: "
            "none is left for R-workers"
        )
    first, last, left = [], [], num_slots - count
    for host in hosts:
        mine = min(host.slots, left)
        first += [HostSlots(host.name, mine)] if mine else []
        last += [HostSlots(host.name, host.slots - mine)] if mine < host.slots else []
        left -= mine
    return tuple(first), tuple(last)


def _lines(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if stripped := line.partition("#")[0].strip():
            yield number, stripped


def _host(line: str) -> HostSlots:
    match = _LINE.fullmatch(line)
    if not match:
        raise ConfigError(f"a line is a host and its slots, such as `node1 slots=2`, not {line!r:.80}")
    slots = int(match.group(2) or 1)
    most_slots = 4096
    if not 1 <= slots <= most_slots:
        raise ConfigError(f"slots must be 1 to {most_slots}, not {slots}")
    return HostSlots(match.group(1), slots)


S_COMMAND = "fastdecode bench throughput"
R_COMMAND = "fastdecode r-worker"
P_COMMAND = "fastdecode prefill-worker"
FIRST_PORT, FIRST_PREFILL_PORT = 5580, 9700


@dataclass(frozen=True)
class JobShape:
    """A job: the S-worker's command, and one R-worker or prefill worker per slot with ``r_flags`` or ``p_flags``.

    ``named``: the user chose the hosts, not a batch system. ``p_gpu``: each prefill worker needs a node with a
    GPU. ``s_rest``: "--" and the words behind it in the S-worker's command. ``guard``: security flags for all ranks of
    an MPI job whose prefill workers connect over TCP.
    """

    s_host: str
    r_hosts: tuple[HostSlots, ...]
    s_command: str = S_COMMAND
    r_flags: str = ""
    named: bool = True
    s_rest: str = ""
    p_hosts: tuple[HostSlots, ...] = ()
    p_flags: str = ""
    p_gpu: bool = False
    guard: str = ""

    @property
    def num_r_workers(self) -> int:
        """The number of R-workers on all hosts."""
        return sum(host.slots for host in self.r_hosts)

    @property
    def num_prefill_workers(self) -> int:
        """The number of prefill workers on all hosts."""
        return sum(host.slots for host in self.p_hosts)

    @property
    def s_line(self) -> str:
        """The S-worker's command in an MPI job."""
        prefill = f" --prefill-workers mpi:{self.num_prefill_workers}" if self.p_hosts else ""
        return f"{self.s_command} --r-workers mpi{prefill}{self.guard}{self.s_rest}"

    @property
    def r_line(self) -> str:
        """An R-worker's command in an MPI job."""
        return f"{R_COMMAND} --transport mpi{self.r_flags}{self.guard}"

    @property
    def p_line(self) -> str:
        """A prefill worker's command in an MPI job."""
        return f"{P_COMMAND} --transport mpi{self.p_flags}{self.guard}"


def openmpi_line(job: JobShape, hostfile: str, oversubscribed: bool = False, mpirun: str = "mpirun") -> str:
    """Return the mpirun command of Open MPI for ``job``. ``oversubscribed``: too few cores to bind processes."""
    binding = "--map-by :oversubscribe --bind-to none" if oversubscribed else "--map-by numa --bind-to numa"
    return f"{mpirun} --hostfile {hostfile} {binding} {_ranks(job)}"


def mpich_line(job: JobShape, mpiexec: str = "mpiexec") -> str:
    """Return MPICH's mpiexec command for ``job``. It names the hosts, since MPICH cannot read Open MPI's hostfiles."""
    slots = {job.s_host: 1}
    for host in (*job.r_hosts, *job.p_hosts):
        slots[host.name] = slots.get(host.name, 0) + host.slots
    hosts = ",".join(f"{name}:{count}" for name, count in slots.items())
    return f"{mpiexec} -hosts {hosts} -bind-to numa {_ranks(job)}"


def _ranks(job: JobShape) -> str:
    """Return the arguments "-n COUNT COMMAND : …" for all ranks of ``job``, which every mpirun accepts."""
    prefill = f" \\\n  : -n {job.num_prefill_workers} {job.p_line}" if job.p_hosts else ""
    return f"-n 1 {job.s_line} \\\n  : -n {job.num_r_workers} {job.r_line}{prefill}"


def srun_line(job: JobShape) -> str:
    """Return the srun command that starts ``job``. srun ends the job if a rank dies."""
    hosts = f" --nodelist={job.s_host}" if job.named else ""
    prefill = f" \\\n  : {_nodes(job, job.p_hosts)} --cpu-bind=ldoms {job.p_line}" if job.p_hosts else ""
    return (
        f"srun --mpi=pmix --kill-on-bad-exit=1 --nodes=1 --ntasks=1{hosts} {job.s_line} \\\n"
        f"  : {_nodes(job, job.r_hosts)} --cpu-bind=ldoms {job.r_line}{prefill}"
    )


def slurm_script(job: JobShape) -> str:
    """Return a Slurm batch script that starts ``job``.

    The job is heterogeneous: one node with the GPU, the R-workers' hosts, and the prefill workers' hosts.
    """
    hosts = f" --nodelist={job.s_host}" if job.named else ""
    prefill = (
        ("#SBATCH hetjob", f"#SBATCH {_nodes(job, job.p_hosts)} --exclusive{' --gpus-per-node=1' * job.p_gpu}"),
        f" \\\n  : --het-group=2 --cpu-bind=ldoms {job.p_line}",
    )
    more, last = prefill if job.p_hosts else ((), "")
    lines = (
        "#!/bin/bash",
        "#SBATCH --job-name=fastdecode",
        f"#SBATCH --nodes=1 --ntasks=1{hosts} --gpus-per-node=1",
        "#SBATCH hetjob",
        f"#SBATCH {_nodes(job, job.r_hosts)} --exclusive",
        *more,
        f"srun --mpi=pmix --kill-on-bad-exit=1 --het-group=0 {job.s_line} \\",
        f"  : --het-group=1 --cpu-bind=ldoms {job.r_line}{last}",
    )
    return "\n".join(lines)


def ray_lines(job: JobShape) -> str:
    """Return shell commands that start a Ray cluster and ``job`` on it.

    The S-worker runs on the head node, where Ray places no worker.
    """
    hosts = ", ".join(host.name for host in job.r_hosts)
    return "\n".join(
        (
            f"ray start --head --num-cpus=0  # on {job.s_host}",
            f"ray start --address={job.s_host}:6379  # on {hosts}",
            f"ray job submit --address=http://{job.s_host}:8265 -- \\\n  {job.s_command} \\\n"
            f"  --r-workers ray:{job.num_r_workers}{job.r_flags}{job.s_rest}",
        )
    )


def ssh_commands(job: JobShape, key_file: str) -> Iterator[tuple[str, str]]:
    """Yield (host, command) to start each R-worker and prefill worker of ``job`` over ssh.

    The workers listen on consecutive TCP ports; no MPI is needed.

    Each worker binds itself to a NUMA node of its host, or to no node if it is the host's only worker.
    """
    shares = [(host, index, R_COMMAND, FIRST_PORT, job.r_flags) for host in job.r_hosts for index in range(host.slots)]
    shares += [
        (host, index, P_COMMAND, FIRST_PREFILL_PORT, job.p_flags) for host in job.p_hosts for index in range(host.slots)
    ]
    slots = Counter(host.name for host, *_ in shares)
    nodes: Counter[str] = Counter()
    for host, index, command, first_port, flags in shares:
        node = nodes[host.name]
        nodes[host.name] += 1
        bind = f"numactl --cpunodebind={node} --membind={node} " if slots[host.name] > 1 else ""
        listen = f"--listen 'tcp://*:{first_port + index}' --key-file {key_file}"
        yield host.name, f"{bind}{command} {listen}{flags}"


def ssh_s_line(job: JobShape, key_file: str) -> str:
    """Return the S-worker's command for R-workers and prefill workers that listen on TCP ports."""
    prefill = f" --prefill-workers {_addresses(job.p_hosts, FIRST_PREFILL_PORT)}" if job.p_hosts else ""
    r_workers = f"--r-workers {_addresses(job.r_hosts, FIRST_PORT)}{prefill}"
    return f"{job.s_command} {r_workers} --key-file {key_file}{job.s_rest}"


def _addresses(hosts: Sequence[HostSlots], first_port: int) -> str:
    return ",".join(f"{host.name}:{first_port + index}" for host in hosts for index in range(host.slots))


def _nodes(job: JobShape, hosts: Sequence[HostSlots]) -> str:
    named = f" --nodelist={','.join(host.name for host in hosts)}" if job.named else ""
    return f"--nodes={len(hosts)} --ntasks={sum(host.slots for host in hosts)}{named}"
