"""Prints as JSON which modules of the product a steady greedy step crosses, and which the process has imported.

Run as ``python step_modules.py ADDRESS`` with the address of a listening R-worker.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from fastdecode import LLM, SamplingParams
from fastdecode.api.engine_fields import DEMO_MODEL

ROOT = Path(__file__).resolve().parents[2]


def crossed(llm: LLM) -> set[str]:
    """Return the files of the product whose code runs in one steady step of four greedy sequences."""
    engine, names = llm.llm_engine, set()
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    for number in range(4):
        engine.add_request(str(number), {"prompt_token_ids": [1, 2, 3, 4, 5 + number]}, params)
    for _ in range(6):
        engine.step()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            names.add(frame.f_code.co_filename)

    sys.setprofile(note)
    engine.step()
    sys.setprofile(None)
    own = ("fastdecode", "sworker", "cluster", "perfmodel")
    return {name for name in names if name.startswith(tuple(f"{ROOT}/{folder}/" for folder in own))}


def main() -> None:
    """Print the modules that a step crosses, and those imported for one, after the server's were imported too."""
    with LLM(str(DEMO_MODEL), r_workers=sys.argv[1], dtype="float32", max_model_len=256) as llm:
        names = crossed(llm)
    import fastdecode.server.run  # noqa: F401

    imported = [name for name in sys.modules if name.startswith("fastdecode.")]
    print(json.dumps({"crossed": sorted(names), "imported": sorted(imported)}))


if __name__ == "__main__":
    main()
