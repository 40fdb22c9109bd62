"""Prints the identity of each model in int8 with calibrated weights: ``python calibrated_codes.py FOLDER…``."""

from __future__ import annotations

import sys

from fastdecode.api.config import EngineConfig
from fastdecode.sworker import SModel

SETTINGS = {"quantization": "int8", "device": "cpu", "skip_tokenizer_init": True, "int8_calibration_tokens": 300}


def identities(folders: list[str]) -> list[str]:
    """Return the identities, which include a hash of all weights, in float32 and in bfloat16."""
    dtypes = ("float32", "bfloat16")
    return [SModel(EngineConfig(each, dtype=dtype, **SETTINGS)).identity for each in folders for dtype in dtypes]


if __name__ == "__main__":
    print(*identities(sys.argv[1:]))
