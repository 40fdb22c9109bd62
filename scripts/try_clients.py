"""Run the scripts in examples/clients/ against a server of the demo model.

python scripts/try_clients.py PYTHON [NAME …], where PYTHON is the interpreter of an environment with their packages.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CLIENTS = ROOT / "examples" / "clients"
LIMIT_SECONDS = 600
MODEL = ROOT / "fastdecode" / "demo_model"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FLAGS = ["--port", "0", "--served-model-name", "demo", "--chat-template", TEMPLATE, "--device", "cpu"]
FLAGS += ["--max-model-len", "2048", "--kv-cache-memory", "64MiB"]


@contextlib.contextmanager
def server() -> Iterator[str]:
    """Start a server of the demo model and yield its URL, which ends with /v1."""
    command = [str(Path(sys.executable).with_name("fastdecode")), "serve", *FLAGS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        found = re.search(r" at (http://\S+) ", process.stdout.readline())
        try:
            if not found:
                raise SystemExit("the server did not start")
            yield f"{found[1]}/v1"
        finally:
            process.terminate()


def main(python: str, *names: str) -> int:
    """Run the named scripts, or all. Return 1 if one fails."""
    paths = [
        path for path in sorted(CLIENTS.glob("with_*.py")) if not names or path.stem.removeprefix("with_") in names
    ]
    quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    failed = []
    with server() as url:
        for path in paths:
            more = [str(MODEL)] if path.stem == "with_lm_eval" else []
            command = [python, str(path), url, "demo", *more]
            if subprocess.run(command, check=False, timeout=LIMIT_SECONDS, env={**os.environ, **quiet}).returncode:
                failed.append(path.stem)
    print(f"{len(paths) - len(failed)} of {len(paths)} clients pass{'; failed: ' if failed else ''}{', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
