"""Adds the models' tokens with the installed versions to references.json: python tests/helpers/record_references.py"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def record() -> None:
    """Generate with every model; keep the entries of other versions."""
    import torch
    import transformers

    from helpers import model_zoo

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    kept: dict[str, Any] = {"comment": "What transformers generates (tests/helpers/model_zoo.py).", "references": {}}
    if model_zoo.RECORDED.exists():
        kept = json.loads(model_zoo.RECORDED.read_text())
    found: dict[str, Any] = {}
    for name in model_zoo.ARCHITECTURES:
        print(name, flush=True)
        reference = model_zoo.generate(model_zoo.build_model(name), model_zoo.prompts(name))
        found[name] = {"recipe": model_zoo.recipe_digest(name), **vars(reference)}
    kept["references"][model_zoo.versions()] = found
    model_zoo.RECORDED.write_text(lines(kept))


def lines(kept: dict[str, Any]) -> str:
    """Return JSON with one line per text."""
    text = json.dumps(kept, indent=1)
    rows = {json.dumps(row, indent=1): json.dumps(row) for each in kept["references"].values() for row in _rows(each)}
    for spread, flat in rows.items():
        text = text.replace(spread.replace("\n", "\n     "), flat)
    return text + "\n"


def _rows(references: dict[str, Any]) -> list[list[int]]:
    return [row for each in references.values() for row in each["tokens"]]


if __name__ == "__main__":
    record()
