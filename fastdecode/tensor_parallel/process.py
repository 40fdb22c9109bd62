"""The process of a rank that rank 0 starts: ``python -m fastdecode.tensor_parallel.process SETTINGS``, in JSON."""

from __future__ import annotations

import json
import logging
import signal
import sys

from fastdecode.api.config import EngineConfig


def main() -> None:
    """Serve rank 0; Ctrl-C is for that alone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level="WARNING", format="%(levelname)s %(name)s: %(message)s")
    from fastdecode.tensor_parallel.ranks import begin_ranks

    begin_ranks(EngineConfig(**json.loads(sys.argv[1])))


if __name__ == "__main__":
    main()
