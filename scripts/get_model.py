"""Fetch a small chat model once and print the folder it is in, as `fastdecode get-model` does: `make model`."""

from __future__ import annotations

import sys

from fastdecode.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["get-model"]))
