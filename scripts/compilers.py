"""Build the R-worker with every installed compiler and test its kernels: `make compilers`.

For each compiler and optimization level, the C++ tests run, then tests/rworker on the extension, with all instruction
sets of this CPU. A table shows what passed, failed (with the log's name) or is not installed. The exit status is 1 if
any failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "out" / "compilers"
BIN = Path(sys.executable).parent
GNU = [f"g++-{version}" for version in range(11, 16)]
CLANG = [f"clang++-{version}" for version in range(13, 21)]
OPTIMIZATIONS = ["-O2", "-O3"]


def find(name: str) -> str | None:
    """Return the command of a compiler, or None. "zig" is clang as a Python package (`pip install ziglang`)."""
    if name != "zig":
        return shutil.which(name)
    if subprocess.run([sys.executable, "-m", "ziglang", "version"], capture_output=True, check=False).returncode:
        return None
    wrapper = OUT / "zig-c++"
    # Without -target, zig would use all instructions of this CPU in every file.
    wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} -m ziglang c++ -target x86_64-linux-gnu "$@"\n')
    wrapper.chmod(0o755)
    return str(wrapper)


def check(compiler: str, name: str, optimization: str) -> bool:
    """Build and test with one compiler; return whether all tests pass. A log beside the build has all output."""
    build = OUT / (name + optimization)
    pybind11 = subprocess.check_output([sys.executable, "-m", "pybind11", "--cmakedir"], text=True).strip()
    configure = [str(BIN / "cmake"), "-S", str(ROOT), "-B", str(build), f"-DCMAKE_CXX_COMPILER={compiler}"]
    configure += [f"-DFASTDECODE_KERNEL_OPTIMIZATION={optimization}", "-DFASTDECODE_BUILD_TESTS=ON"]
    configure += [f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind11}"]
    compile_all = [str(BIN / "cmake"), "--build", str(build), f"-j{os.cpu_count()}"]
    with build.with_name(build.name + ".log").open("w") as log:

        def run(command: list[str], **environment: str) -> bool:
            done = subprocess.run(
                command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | environment, check=False
            )
            return done.returncode == 0

        if not (run(configure) and run(compile_all)):
            return False
        cpp = run([str(build / "rworker_cpp" / "rworker_tests")])
        extension = str(next((build / "rworker_cpp").glob("_rworker.*.so")))
        pytest = [str(BIN / "pytest"), "-q", "-n", "2", str(ROOT / "tests" / "rworker")]
        return run(pytest, RWORKER_EXTENSION=extension, RWORKER_TESTED="") and cpp


def main() -> int:
    """Test all compilers. Return 1 if any compiler's kernels failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("compilers", nargs="*", default=[*GNU, *CLANG, "zig"])
    parser.add_argument("--optimizations", default=",".join(OPTIMIZATIONS), help="comma list (%(default)s)")
    options = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    all_passed = True
    print("| compiler | optimization | result |\n|---|---|---|")
    for name in options.compilers:
        compiler = find(name)
        if compiler is None:
            print(f"| {name} | | not available |", flush=True)
            continue
        for optimization in options.optimizations.split(","):
            passed = check(compiler, name, optimization)
            result = "passed" if passed else f"failed: out/compilers/{name}{optimization}.log"
            print(f"| {name} | {optimization} | {result} |", flush=True)
            all_passed &= passed
    return 0 if all_passed else 1


if __name__ == "__main__":
    sys.exit(main())
