"""Test Simon Willison's ``llm``: a model in a YAML file, a prompt, a stream, a schema. python with_llm.py URL MODEL"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

url, model = sys.argv[1:]
LLM = str(Path(sys.executable).with_name("llm"))


def ask(folder: str, *words: str) -> str:
    """Run ``llm`` with the arguments ``words`` and the settings in ``folder``; return what it prints."""
    return subprocess.run(
        [LLM, *words], env={**os.environ, "LLM_USER_PATH": folder}, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


with tempfile.TemporaryDirectory() as folder:
    told = {"model_id": "here", "model_name": model, "api_base": url, "supports_schema": True, "can_stream": True}
    (Path(folder) / "extra-openai-models.yaml").write_text(json.dumps([told]))
    words = [
        "prompt",
        "-m",
        "here",
        "--key",
        "none",
        "-o",
        "max_tokens",
        "60",
        "-o",
        "temperature",
        "0",
        "Who are you?",
    ]
    assert ask(folder, *words, "-s", "Be short.", "--no-stream") == ask(folder, *words, "-s", "Be short.")
    told = ask(folder, *words, "--schema", json.dumps({"enum": ["red", "blue"], "type": "string"}))
    assert json.loads(told) in ("red", "blue")
print("llm: ok")
