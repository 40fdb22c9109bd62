"""Download a small chat model, unless it is there, and print its folder, like `fastdecode get-model`: `make model`."""

from __future__ import annotations

import sys

from fastdecode.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["get-model"]))
