"""Make the wheel of `fastdecode-r-worker` from a wheel of `fastdecode`, for hosts that only run R-workers.

It has the same files without the S-part, and only four packages as dependencies.

    python scripts/r_worker_wheel.py dist/fastdecode-0.1.0-….whl --out dist
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path

NAME = "fastdecode-r-worker"
DEPENDENCIES = ("msgspec", "numpy", "psutil", "pyzmq")
EXTRAS = ("mpi",)
LEFT_OUT = re.compile(r"fastdecode/(sworker/|demo_model/|_sworker\b)")
SUMMARY = "R-workers of FastDecode: KV cache and attention for an S-worker on another host, without torch"
DESCRIPTION = """
`pip install fastdecode-r-worker` on hosts that run `fastdecode r-worker`, in an environment of its own: its files are
among those of `fastdecode`, which the S-worker's host installs, and both cannot lie in one environment.
"""


def r_worker_files(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files of the R-worker's wheel by name, selected from those of the whole wheel; RECORD is last."""
    kept = {}
    for name, content in files.items():
        if not LEFT_OUT.match(name) and not name.endswith(".dist-info/RECORD"):
            own = re.sub(r"^fastdecode(-[^/]+\.dist-info/)", r"fastdecode_r_worker\1", name)
            kept[own] = r_worker_metadata(content.decode()).encode() if own.endswith("-info/METADATA") else content
    folder = next(name for name in kept if name.endswith("-info/METADATA")).rpartition("/")[0]
    return kept | {f"{folder}/RECORD": record(kept, f"{folder}/RECORD").encode()}


def r_worker_metadata(metadata: str) -> str:
    """Return the whole wheel's metadata with the R-worker's name, and fewer dependencies and extras."""
    lines = metadata.partition("\n\n")[0].splitlines()
    replaced = {"Name": NAME, "Summary": SUMMARY}
    return "".join(f"{_replace(line, replaced)}\n" for line in lines if _is_kept(line)) + DESCRIPTION


def _replace(line: str, replaced: Mapping[str, str]) -> str:
    field = line.partition(":")[0]
    return f"{field}: {replaced[field]}" if field in replaced else line


def _is_kept(line: str) -> bool:
    field, _, value = line.partition(": ")
    if field == "Provides-Extra":
        return value in EXTRAS
    if field != "Requires-Dist":
        return True
    extra = re.search(r"extra == ['\"]([\w-]+)['\"]", value)
    return extra[1] in EXTRAS if extra else re.match(r"[\w-]+", value)[0] in DEPENDENCIES  # type: ignore[index]


def record(files: Mapping[str, bytes], own_name: str) -> str:
    """Return the content of RECORD: name, digest and size of each file, and RECORD's own name without them."""

    def digest(content: bytes) -> str:
        return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")

    return (
        "".join(f"{name},sha256={digest(content)},{len(content)}\n" for name, content in files.items())
        + f"{own_name},,\n"
    )


def make_r_worker_wheel(wheel: Path, folder: Path) -> Path:
    """Write the R-worker's wheel, made from ``wheel`` (`fastdecode-….whl`), into ``folder``; return its path."""
    with zipfile.ZipFile(wheel) as whole:
        infos = {info.filename: info for info in whole.infolist() if not info.is_dir()}
        files = r_worker_files({name: whole.read(name) for name in infos})
    made = folder / wheel.name.replace("fastdecode-", "fastdecode_r_worker-", 1)
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            info = zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0))
            info.external_attr = (0o755 if name.endswith(".so") else 0o644) << 16
            archive.writestr(info, content, zipfile.ZIP_DEFLATED)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("dist"), help="folder for the new wheel (%(default)s)")
    options = parser.parse_args()
    for wheel in options.wheels:
        print(make_r_worker_wheel(wheel, options.out))


if __name__ == "__main__":
    main()
