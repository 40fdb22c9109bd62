"""Check a running server's OpenAPI document with schemathesis: no answer may have status 500. python fuzz/api.py"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from helpers.servers import CHAT_TEMPLATE, serving  # noqa: E402


def main() -> int:
    """Return schemathesis' exit status: 1 if any answer had status 500."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-examples", type=int, default=100, help="most examples per route and phase (100)")
    parser.add_argument("--max-time", type=int, default=420, help="most seconds of the whole run (420)")
    args = parser.parse_args()
    schemathesis = str(Path(sys.executable).parent / "schemathesis")
    limits = ["--max-model-len", "64", "--max-num-seqs", "16", "--chat-template", CHAT_TEMPLATE]
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), *limits) as server:
        command = [schemathesis, "run", f"{server.url}/openapi.json", "--checks", "not_a_server_error"]
        command += ["--max-examples", str(args.max_examples), "--max-time", str(args.max_time)]
        command += ["--request-timeout", "60"]
        status = subprocess.run(command, cwd=folder, check=False).returncode
        print(server.log.read_text()[-2000:] if "Traceback" in server.log.read_text() else "no traceback in the log")
        return status


if __name__ == "__main__":
    sys.exit(main())
