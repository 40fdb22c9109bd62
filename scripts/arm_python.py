"""Make a folder with Python and an R-worker for ARM, to run under qemu: `make arm-python`, on Debian or a derivative.

    python scripts/arm_python.py FOLDER EXTENSION

FOLDER gets Debian's python3 for arm64, unpacked but not installed, and wheels that an R-worker and the kernels' tests
need. It also gets links to this checkout's ``fastdecode``, with EXTENSION as its ``_rworker``, and two programs:
FOLDER/python and FOLDER/fastdecode. QEMU_CPU names the processor that qemu imitates.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TAG = f"cpython-{sys.version_info.major}{sys.version_info.minor}-aarch64-linux-gnu"
DEBIAN = ("python3", "libstdc++6")
WHEELS = ("numpy", "pyzmq", "msgspec", "psutil")
TOOLS = (
    "pytest", "pytest-timeout", "pytest-xdist", "execnet", "pluggy", "iniconfig", "packaging", "hypothesis",
    "sortedcontainers", "pygments",
)  # fmt: skip
"""Tools of the kernels' tests, in the versions that this environment and the wheels have."""

PLATFORMS = ("manylinux2014", "manylinux_2_17", "manylinux_2_26", "manylinux_2_27", "manylinux_2_28")
PROGRAM = """#!/bin/sh
export PYTHONSAFEPATH=1 PYTHONHOME={folder}/system/usr
export PYTHONPATH={folder}/app:{folder}/wheels${{PYTHONPATH:+:$PYTHONPATH}}
exec qemu-aarch64-static -L {folder}/system {folder}/system/usr/bin/python{version} {words}"$@"
"""


def unpack_debian(folder: Path) -> None:
    """Unpack the packages DEBIAN and their dependencies for arm64. apt uses a separate state, not the machine's."""
    state = folder / "apt"
    for part in ("lists/partial", "cache/archives/partial"):
        (state / part).mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    options = {
        "APT::Architecture": "arm64", "APT::Architectures::": "arm64", "Dir::State": state,
        "Dir::State::lists": state / "lists", "Dir::State::status": state / "status", "Dir::Cache": state / "cache",
    }  # fmt: skip
    apt = ["apt-get", "-qq", *(word for name, value in options.items() for word in ("-o", f"{name}={value}"))]
    subprocess.run([*apt, "update"], check=True)
    subprocess.run([*apt, "-y", "--no-install-recommends", "--download-only", "install", *DEBIAN], check=True)
    for package in sorted((state / "cache" / "archives").glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", package, folder / "system"], check=True)


def unpack_wheels(folder: Path) -> None:
    """Unpack WHEELS and TOOLS for arm64, in the versions that are installed here."""
    store = folder / "store"
    pinned = [f"{name}=={importlib.metadata.version(name)}" for name in (*WHEELS, *TOOLS)]
    platforms = [word for name in PLATFORMS for word in ("--platform", f"{name}_aarch64")]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps", "--only-binary",
         ":all:", *platforms, "--dest", store, *pinned], check=True,
    )  # fmt: skip
    for wheel in sorted(store.glob("*.whl")):
        zipfile.ZipFile(wheel).extractall(folder / "wheels")


def link_package(folder: Path, extension: Path) -> None:
    """Link each entry of this checkout's ``fastdecode`` into ``folder``, and the ARM extension in place of ours."""
    package = folder / "app" / "fastdecode"
    shutil.rmtree(package, ignore_errors=True)
    package.mkdir(parents=True)
    for entry in (ROOT / "fastdecode").iterdir():
        if entry.suffix != ".so":
            (package / entry.name).symlink_to(entry)
    shutil.copy(extension, package / f"_rworker.{TAG}.so")


def write_programs(folder: Path) -> None:
    version = sysconfig.get_python_version()
    if not (folder / "system" / "usr" / "bin" / f"python{version}").exists():
        sys.exit(f"Debian's python3 is no {version}, which the extension was built for: make .venv with Debian's")
    for name, words in (("python", ""), ("fastdecode", "-m fastdecode.cli.main ")):
        (folder / name).write_text(PROGRAM.format(folder=folder, version=version, words=words))
        (folder / name).chmod(0o755)


def main() -> None:
    folder, extension = (Path(argument).resolve() for argument in sys.argv[1:3])
    if not (folder / "system").exists():
        unpack_debian(folder)
    if not (folder / "wheels").exists():
        unpack_wheels(folder)
    link_package(folder, extension)
    write_programs(folder)


if __name__ == "__main__":
    main()
