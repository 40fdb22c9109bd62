"""Build dist/gpu-kit, which tests and measures FastDecode on a GPU host without a package index: `make gpu-kit`.

It holds wheels of this project for each requested Python, wheels that a host with torch and transformers may lack, the
kit's modules, the GPU tests, configurations of models, and run.sh.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

import wheels

ROOT = Path(__file__).resolve().parents[1]
KIT = ROOT / "dist" / "gpu-kit"
MOST_BYTES = 60 << 20
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_24_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
PACKAGES = ("accelerate", "greenlet", "msgspec", "psutil", "pyzmq", "tqdm", "torchao")
"""FastDecode's dependencies beside torch and transformers, and the package that packs plain weights."""

FOR_TESTS = ("pytest", "pluggy", "iniconfig", "packaging", "pygments", "pytest-timeout", "pytest-xdist", "execnet",
             "hypothesis", "sortedcontainers")  # fmt: skip
TESTS = ("conftest.py", "test_cuda.py", "references.json", "helpers", "doubles")


def main() -> None:
    """Build the kit, and print its size and the seconds that this took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser.add_argument("--pythons", default=",".join(dict.fromkeys(("3.12", own))), help="comma list (%(default)s)")
    args = parser.parse_args()
    start = time.perf_counter()
    shutil.rmtree(KIT, ignore_errors=True)
    (KIT / "wheels").mkdir(parents=True)
    versions = args.pythons.split(",")
    build_wheels(versions)
    for version in versions:
        fetch(version)
    copy_files()
    size = sum(file.stat().st_size for file in KIT.rglob("*") if file.is_file())
    if size > MOST_BYTES:
        sys.exit(f"gpu-kit: {size / 2**20:.1f} MiB is more than {MOST_BYTES >> 20}")
    print(f"{KIT.relative_to(ROOT)}: {size / 2**20:.1f} MiB, in {time.perf_counter() - start:.0f} s")


def build_wheels(versions: list[str]) -> None:
    """Build this project's wheels into the kit, as `make wheels` does."""
    wheels.DIST = ROOT / "out" / "gpu-kit"
    processor = platform.machine()
    wheels.check_compilers([processor])
    shutil.rmtree(wheels.DIST, ignore_errors=True)
    shutil.rmtree(wheels.OUT / "plain", ignore_errors=True)
    wheels.OUT.mkdir(parents=True, exist_ok=True)
    _, source = wheels.make_sdist()
    for version in versions:
        python = wheels.find_python(version)
        if python is None:
            print(f"Python {version} with headers was not found here: no wheels for it", flush=True)
            continue
        made = wheels.make_wheel(source, wheels.make_environment(python, version), version, processor)
        shutil.copy(made[0], KIT / "wheels")
        print(f"{made[0].name}: {made[0].stat().st_size / 1e6:.1f} MB", flush=True)


def fetch(version: str) -> None:
    """Fetch wheels of the other packages for one Python version."""
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "-q", "--no-deps", "-d"]
    command += [str(KIT / "wheels"), "--only-binary=:all:", "--python-version", version, "--implementation", "cp"]
    command += [word for each in PLATFORMS for word in ("--platform", each)]
    subprocess.run([*command, *PACKAGES, *FOR_TESTS], check=True, cwd=ROOT)


def copy_files() -> None:
    """Copy the kit's modules and the tests of a GPU."""
    skip = shutil.ignore_patterns("__pycache__", "run.sh")
    shutil.copytree(ROOT / "scripts" / "gpu_kit", KIT / "gpu_kit", ignore=skip)
    shutil.copy(ROOT / "scripts" / "gpu_kit" / "run.sh", KIT / "run.sh")
    for name in TESTS:
        place = ROOT / "tests" / name
        if place.is_dir():
            shutil.copytree(place, KIT / "tests" / name, ignore=skip)
        elif place.exists():
            (KIT / "tests").mkdir(exist_ok=True)
            shutil.copy(place, KIT / "tests" / name)


if __name__ == "__main__":
    main()
