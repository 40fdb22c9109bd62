"""Install each wheel in dist/ that fits this Python and processor in a new environment, and use it: `make try-wheels`.

No compiler is on the PATH. The R-worker's wheel runs an R-worker for `fastdecode doctor`; the whole wheel generates
with the demo model. Seconds and sizes are printed.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "out" / "try-wheels"
README_COMMANDS = (
    ("--help",),
    ("generate", "def read(self):", "--max-tokens", "16", "--kv-cache-memory", "64MiB"),
    ("generate", "def read(self):", "--max-tokens", "16", "--kv-cache-memory", "64MiB", "--r-workers", "spawn:2"),
    ("plan", "--model", "llama-7b", "--gpu", "a10", "--cpu", "epyc-7452", "--seq-len", "1024"),
    ("doctor",),
)


def wheel_of(name: str) -> Path:
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    found = list((ROOT / "dist").glob(f"{name}-*-{tag}-*_{platform.machine()}.whl"))
    if len(found) != 1:
        sys.exit(f"try_wheels: dist/ has {len(found)} wheels {name} of {tag}, {platform.machine()}; run `make wheels`")
    return found[0]


def run(environment: Path, *command: str) -> str:
    """Return the output of a program of the environment; exit if it fails."""
    done = subprocess.run(
        [environment / "bin" / command[0], *command[1:]], cwd=OUT, env=only(environment), check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{done.stdout}\ntry_wheels: {' '.join(command)} ended with {done.returncode}")
    return done.stdout


def only(environment: Path) -> dict[str, str]:
    """Return environment variables: the PATH has only this environment's programs; pip's settings are kept."""
    kept = {name: value for name, value in os.environ.items() if name == "HOME" or name.startswith(("PIP_", "XDG_"))}
    return kept | {"PATH": str(environment / "bin"), "LANG": "C.UTF-8"}


def install(name: str, *more: str, first: str = "") -> Path:
    """Make a new environment, install a wheel in it, and print time and size. Return the environment's folder.

    The package ``first`` is installed before, and timed separately.
    """
    environment = OUT / name
    shutil.rmtree(environment, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    wheel = str(wheel_of(name.replace("-", "_")))
    if first:
        print(f"{first}: installed in {pip_install(environment, *more, first):.1f} s", flush=True)
    seconds = pip_install(environment, *more, wheel)
    (packages,) = environment.glob("lib/python*/site-packages")
    own = bytes_in(packages / "fastdecode") + sum(map(bytes_in, packages.glob("fastdecode*.dist-info")))
    needed = [each for each in packages.iterdir() if not each.name.startswith(("pip", "setuptools", "_distutils"))]
    every = sum(map(bytes_in, needed))
    print(f"{name}: installed in {seconds:.1f} s; {own / 1e6:.1f} MB, with all that it needs {every / 1e6:.1f} MB")
    return environment


def pip_install(environment: Path, *words: str) -> float:
    """Install with pip; return the seconds that it took."""
    start = time.perf_counter()
    run(environment, "pip", "install", "--disable-pip-version-check", "-q", *words)
    return time.perf_counter() - start


def bytes_in(path: Path) -> int:
    return sum(each.stat().st_size for each in path.rglob("*") if each.is_file())


@contextmanager
def r_worker(environment: Path) -> Iterator[str]:
    """Start an R-worker and yield its "host:port"."""
    command = [environment / "bin" / "fastdecode", "r-worker", "--listen", "tcp://127.0.0.1:0"]
    process = subprocess.Popen(
        [*command, "--kv-cache-memory", "64MiB"], cwd=OUT, env=only(environment), stdout=subprocess.PIPE, text=True
    )
    try:
        line = process.stdout.readline() if process.stdout else ""
        address = re.search(r"tcp://(\S+:\d+)", line)
        if not address:
            sys.exit(f"try_wheels: the R-worker did not start: {line}")
        yield address[1]
    finally:
        process.terminate()
        process.wait()


def try_r_worker() -> None:
    environment = install("fastdecode-r-worker")
    with r_worker(environment) as address:
        found = run(environment, "fastdecode", "doctor", "--r-workers", address)
    print(*re.findall(rf".*R-worker {address}.*", found))
    heavy = re.findall(r"^(?:torch|transformers)\b.*", run(environment, "pip", "list"), re.MULTILINE)
    if heavy:
        sys.exit(f"try_wheels: fastdecode-r-worker brought {', '.join(heavy)}")


def try_whole() -> None:
    constraints = [] if shutil.which("nvidia-smi") else ["-c", str(ROOT / "constraints-cpu.txt")]
    environment = install("fastdecode", *constraints, first="torch")
    for words in README_COMMANDS:
        start = time.perf_counter()
        run(environment, "fastdecode", *words)
        print(f"  fastdecode {' '.join(words)}: {time.perf_counter() - start:.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--r-worker-only", action="store_true", help="not the whole wheel, which brings torch")
    options = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    try_r_worker()
    if not options.r_worker_only:
        try_whole()


if __name__ == "__main__":
    main()
