"""Processes in network namespaces of their own, joined to this one's by shaped links: Linux, as root.

The namespaces have no names: each lives as long as its process, and that ends with this one however it ends. So nothing
is left behind, and nothing can leave them but over these links.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence

TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv")
BURST_BYTES = 1 << 17
"""What a link may send at once: two of the kernel's largest packets, 1 ms at 1 Gbit/s."""

_INSIDE = "FASTDECODE_BENCHMARK_NAMESPACE"


def enter_namespace() -> None:
    """Start this program anew in an empty network namespace, unless that was done; RuntimeError where impossible."""
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    if os.geteuid() != 0 or missing:
        raise RuntimeError(f"network namespaces need root{', and also ' + ', '.join(missing) if missing else ''}")
    if _INSIDE in os.environ:
        _run("ip", "link", "set", "lo", "up")
        return
    os.environ[_INSIDE] = "1"
    os.execvp("unshare", ["unshare", "--net", sys.executable, *sys.argv])


@contextlib.contextmanager
def linked(index: int, command: Sequence[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """``command`` in a namespace of its own, started once ``link``-ed; yields it and its address."""
    ours, theirs = f"link-{index}", f"10.213.{index}.2"
    waiting = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sh", "-c", 'echo; read _; exec "$@"', "sh"]
    with subprocess.Popen(
        [*waiting, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ
    ) as process:
        try:
            if not (process.stdin and process.stdout and process.stdout.readline()):
                raise RuntimeError("no namespace: see above")
            there = ("nsenter", "-t", str(process.pid), "-n")
            _run("ip", "link", "add", ours, "type", "veth", "peer", "name", "eth0", "netns", str(process.pid))
            _run("ip", "address", "add", f"10.213.{index}.1/24", "dev", ours)
            _run("ip", "link", "set", ours, "up")
            _run(*there, "ip", "address", "add", f"{theirs}/24", "dev", "eth0")
            _run(*there, "ip", "link", "set", "eth0", "up")
            process.stdin.write("\n")
            process.stdin.flush()
            yield process, theirs
        finally:
            process.kill()


def shape(index: int, process: subprocess.Popen[str], gbit_per_s: float) -> None:
    """Let the link of ``process`` carry so much each way."""
    rate = ("tbf", "rate", f"{gbit_per_s * 1000:.0f}mbit", "burst", str(BURST_BYTES), "latency", "100ms")
    _run("tc", "qdisc", "replace", "dev", f"link-{index}", "root", *rate)
    _run("nsenter", "-t", str(process.pid), "-n", "tc", "qdisc", "replace", "dev", "eth0", "root", *rate)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
