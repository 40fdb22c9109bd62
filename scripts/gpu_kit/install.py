"""``install.py HOST_PYTHON WHEELS``: adds the host's packages, and wheels of missing ones, to this new environment.

Wheels are unpacked and this project's console script is written here, so neither pip nor an index is needed.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Sequence
from pathlib import Path

ALWAYS = ("fastdecode", "torchao")
"""Packages that are unpacked even if the host has them, since the report is on the kit's own."""

MODULES = {"pyzmq": "zmq", "python_dateutil": "dateutil", "pytest_xdist": "xdist", "pytest_timeout": "pytest_timeout"}
"""Packages whose module has another name."""

NEEDED = {"torch": (2, 11), "transformers": (5, 17)}


def main(arguments: Sequence[str]) -> None:
    """Fill the environment, or exit with one line that says what the host lacks."""
    host, wheels = arguments
    site = Path(sysconfig.get_path("purelib"))
    check(host)
    (site / "host.pth").write_text("\n".join(host_folders(host)) + "\n", encoding="utf-8")
    for name, wheel in sorted(fitting(Path(wheels)).items()):
        if name in ALWAYS or not has(host, MODULES.get(name, name)):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)
            print(f"from the kit: {wheel.name}")
    program = Path(sysconfig.get_path("scripts")) / "fastdecode"
    lines = f"#!{sys.executable}\nimport sys\nfrom fastdecode.cli.main import main\nsys.exit(main())\n"
    program.write_text(lines, encoding="utf-8")
    program.chmod(0o755)
    if importlib.util.find_spec("fastdecode") is None and not (site / "fastdecode").exists():
        sys.exit(f"run.sh: the kit has no wheel of fastdecode for {tag()}: make gpu-kit PYTHONS={version()}")


def version() -> str:
    """Return this Python's version, such as "3.12"."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def tag() -> str:
    """Return this Python's tag, such as "cp312"."""
    return f"cp{sys.version_info.major}{sys.version_info.minor}"


def asked(host: str, code: str) -> str:
    """Run ``code`` with the host's Python; return what it prints."""
    return subprocess.run([host, "-c", code], capture_output=True, text=True, check=True, timeout=300).stdout


def check(host: str) -> None:
    """Exit with one line if the host's torch or transformers is missing or too old."""
    code = (
        "import json, importlib.metadata as m\nfound = {}\n"
        "for name in ('torch', 'transformers'):\n"
        "    try: found[name] = m.version(name)\n"
        "    except Exception: found[name] = ''\n"
        "print(json.dumps(found))"
    )
    for name, found in json.loads(asked(host, code)).items():
        numbers = tuple(int(each) for each in re.findall(r"\d+", found)[:2])
        if numbers < NEEDED[name]:
            wanted = ".".join(map(str, NEEDED[name]))
            sys.exit(
                f"run.sh: {host} needs {name} {wanted} or newer and has {found or 'none'}: set PYTHON to one that has"
            )


def host_folders(host: str) -> list[str]:
    """Return the folders in which the host's Python finds packages."""
    return [line for line in asked(host, "import sys; print('\\n'.join(sys.path))").splitlines() if "-packages" in line]


def has(host: str, module: str) -> bool:
    """Return whether the host's Python can import ``module``."""
    return asked(host, f"import importlib.util as u; print(u.find_spec({module!r}) is not None)").strip() == "True"


def fitting(wheels: Path) -> dict[str, Path]:
    """Return, by package, the wheel that fits this Python."""
    found: dict[str, Path] = {}
    for wheel in sorted(wheels.glob("*.whl")):
        name, _, *rest = wheel.stem.split("-")
        pythons, abi = rest[-3].split("."), rest[-2]
        if (
            tag() in pythons
            or any(each.startswith("py") for each in pythons)
            or (abi == "abi3" and reaches(pythons[0]))
        ):
            found[name.lower()] = wheel
    return found


def reaches(lowest: str) -> bool:
    """Return whether a wheel for the stable ABI from version ``lowest`` on, such as cp310, runs in this Python."""
    return (int(lowest[2:3]), int(lowest[3:])) <= sys.version_info[:2]


if __name__ == "__main__":
    main(sys.argv[1:])
