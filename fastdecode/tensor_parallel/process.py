"""A rank's process: ``python -m fastdecode.tensor_parallel.process SETTINGS PARENT`` (JSON, parent's process id)."""

from __future__ import annotations

import json
import logging
import signal
import sys

from fastdecode.api.config import EngineConfig
from fastdecode.core.parent import die_with


def main() -> None:
    """Run as a rank that follows rank 0. Ignore Ctrl-C, which only rank 0 handles."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with(int(sys.argv[2]))
    logging.basicConfig(level="WARNING", format="%(levelname)s %(name)s: %(message)s")
    from fastdecode.tensor_parallel.ranks import follow

    follow(EngineConfig(**json.loads(sys.argv[1])))


if __name__ == "__main__":
    main()
