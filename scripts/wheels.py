"""Build dist/: the sdist, and from it the wheels of `fastdecode` and `fastdecode-r-worker`: `make wheels`.

Each package gets a wheel for each processor and each Python from 3.10 to 3.14 that is installed with headers. The
wheels run on glibc 2.28 and later, whichever this host has; auditwheel and ``unversioned`` check that.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from r_worker_wheel import make_r_worker_wheel

ROOT = Path(__file__).resolve().parents[1]
OUT, DIST = ROOT / "out" / "wheels", ROOT / "dist"
PROCESSORS = ("x86_64", "aarch64")
VERSIONS = tuple(f"3.{minor}" for minor in range(10, 15))
GLIBC = "2.28"
GXX = "{}-linux-gnu-g++"  # Debian's packages g++ and g++-aarch64-linux-gnu
TOOLS = ("pip>=23.1", "scikit-build-core>=1.1", "pybind11>=3.0")
"""For `pip wheel -C`, and as [build-system] of pyproject.toml."""


def run(*command: str | Path, **environment: str) -> None:
    """Run a command with this environment's programs. If it fails, show its output and exit."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        list(map(str, command)), env=os.environ | {"PATH": path} | environment, cwd=ROOT, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{done.stdout}\nwheels: {' '.join(map(str, command))} ended with {done.returncode}")


def find_python(version: str) -> Path | None:
    """Return the path of `python3.X` with headers, from the PATH or pyenv; None if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [*sorted(pyenv.glob(f"{version}.*/bin/python{version}")), shutil.which(f"python{version}")]
    for candidate in filter(None, candidates):
        include = "import sysconfig; print(sysconfig.get_path('include'))"
        found = subprocess.run([candidate, "-c", include], capture_output=True, text=True, check=False)
        if found.returncode == 0 and (Path(found.stdout.strip()) / "Python.h").exists():
            return Path(candidate)
    return None


def make_sdist() -> tuple[Path, Path]:
    """Make the sdist; return its path, and the folder in which it is unpacked."""
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", DIST, ROOT)
    (sdist,) = DIST.glob("fastdecode-*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(OUT, filter="data")
    return sdist, OUT / sdist.name.removesuffix(".tar.gz")


def make_environment(python: Path, version: str) -> Path:
    """Return the Python of an environment that can build the extensions. The environment is kept for later builds."""
    own = OUT / f"python{version}" / "bin" / "python"
    if not own.exists():
        run(python, "-m", "venv", OUT / f"python{version}")
    run(own, "-m", "pip", "install", "--disable-pip-version-check", "-q", *TOOLS)
    return own


def check_compilers(processors: Sequence[str]) -> None:
    """Exit with one line if the compiler for a processor is not installed."""
    for processor in processors:
        if shutil.which(GXX.format(processor)) is None:
            package = "g++" if processor == platform.machine() else f"g++-{processor.replace('_', '-')}-linux-gnu"
            others = " ".join(each for each in processors if each != processor) or platform.machine()
            sys.exit(
                f"wheels: no {GXX.format(processor)} was found: apt install {package}, or make wheels "
                f"PROCESSORS={others}"
            )


def make_compiler(processor: str) -> Path:
    """Return a `c++` for CMake.
    It compiles with g++, as in tests, and links with zig, which can target an older glibc.
    """
    folder = OUT / f"compiler-{processor}"
    folder.mkdir(parents=True, exist_ok=True)
    compiler = GXX.format(processor)
    run(compiler, "-O2", "-fPIC", "-c", ROOT / "scripts" / "wheel_glibc.cpp", "-o", folder / "glibc.o")
    (folder / "exports").write_text("{ global: PyInit_*; local: *; };\n")
    libraries = [
        subprocess.check_output([compiler, f"-print-file-name={name}"], text=True).strip()
        for name in ("libstdc++.a", "libgcc.a", "libgcc_s.so.1")
    ]
    link = [sys.executable, "-m", "ziglang", "cc", "-target", f"{processor}-linux-gnu.{GLIBC}", '"$@"']
    link += [str(folder / "glibc.o"), *libraries, "-lpthread", "-lm", f"-Wl,--version-script={folder / 'exports'}"]
    text = f'#!/bin/sh\ncase " $* " in *" -shared "*) exec {" ".join(link)} ;; esac\nexec {compiler} "$@"\n'
    program = folder / "c++"
    if not program.exists() or program.read_text() != text:  # A new file date would make ccache compile again.
        program.write_text(text)
        program.chmod(0o755)
    return program


def cmake_defines(processor: str, version: str) -> dict[str, str]:
    cross = {} if processor == platform.machine() else {"CMAKE_SYSTEM_NAME": "Linux"}
    return cross | {
        "CMAKE_CXX_COMPILER": str(make_compiler(processor)), "CMAKE_MODULE_LINKER_FLAGS": "-s", "CMAKE_STRIP": "",
        "CMAKE_INTERPROCEDURAL_OPTIMIZATION": "OFF",  # zig cannot link g++'s LTO bytecode.
        "CMAKE_SYSTEM_PROCESSOR": processor,
        "PYTHON_MODULE_EXTENSION": f".cpython-{version.replace('.', '')}-{processor}-linux-gnu.so",
        # FindPython runs the interpreter, which is the host's even if the extensions are for another processor.
        "CMAKE_CROSSCOMPILING_EMULATOR": "/usr/bin/env",
    }  # fmt: skip


def unversioned(extension: Path) -> list[str]:
    """Return the symbols that an extension needs and no known library has; only Python's are allowed."""
    said = subprocess.check_output(["readelf", "--dyn-syms", "-W", extension], text=True)
    undefined = [line.split()[7] for line in said.splitlines() if " UND " in line and " GLOBAL " in line]
    return [name for name in undefined if "@" not in name and not name.startswith(("Py", "_Py"))]


def check_symbols(wheel: Path) -> None:
    """Exit if an extension of ``wheel`` would not load with the oldest supported glibc."""
    with zipfile.ZipFile(wheel) as archive:
        for name in (each for each in archive.namelist() if each.endswith(".so")):
            missing = unversioned(Path(archive.extract(name, OUT / "extracted")))
            if missing:
                sys.exit(f"wheels: glibc {GLIBC} has no {', '.join(missing)}, which {name} needs")


def make_wheel(source: Path, python: Path, version: str, processor: str) -> list[Path]:
    """Make both wheels for one Python and processor. C++ code without Python is compiled once per processor."""
    plain = OUT / "plain" / f"{version}-{processor}"
    build = OUT / f"build-{processor}"
    settings: Mapping[str, str] = {"build-dir": str(build), "install.strip": "false"} | {
        f"cmake.define.{name}": value for name, value in cmake_defines(processor, version).items()
    }
    words = [word for name, value in settings.items() for word in ("-C", f"{name}={value}")]
    run(python, "-m", "pip", "wheel", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "-w", plain,
        *words, source, _PYTHON_HOST_PLATFORM=f"linux-{processor}")  # fmt: skip
    (wheel,) = plain.glob("*.whl")
    check_symbols(wheel)
    run(sys.executable, "-m", "auditwheel", "repair", "--plat", "auto", "--only-plat", "-w", DIST, wheel)
    (repaired,) = DIST.glob(f"fastdecode-*-cp{version.replace('.', '')}-*_{processor}.whl")
    check_tag(repaired)
    return [repaired, make_r_worker_wheel(repaired, DIST)]


def check_tag(wheel: Path) -> None:
    """Exit if auditwheel finds that ``wheel`` needs a later glibc than its tag says."""
    tag = re.search(r"manylinux_(\d+)_(\d+)_", wheel.name)
    if not tag or (int(tag[1]), int(tag[2])) > tuple(map(int, GLIBC.split("."))):
        sys.exit(f"wheels: {wheel.name} is for other systems than those with glibc {GLIBC}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pythons", default=",".join(VERSIONS), help="comma list (%(default)s)")
    parser.add_argument("--processors", default=",".join(PROCESSORS), help="comma list (%(default)s)")
    options = parser.parse_args()
    check_compilers(options.processors.split(","))
    for folder in (DIST, OUT / "plain", *(OUT / f"build-{processor}" for processor in PROCESSORS)):
        shutil.rmtree(folder, ignore_errors=True)
    OUT.mkdir(parents=True, exist_ok=True)
    sdist, source = make_sdist()
    print(sdist.relative_to(ROOT), flush=True)
    for version in options.pythons.split(","):
        found = find_python(version)
        if found is None:
            print(f"Python {version} with headers was not found here: no wheels for it", flush=True)
            continue
        python = make_environment(found, version)
        for processor in options.processors.split(","):
            start = time.perf_counter()
            for wheel in make_wheel(source, python, version, processor):
                size = wheel.stat().st_size / 1e6
                print(f"{wheel.relative_to(ROOT)}: {size:.1f} MB", flush=True)
            print(f"  in {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
