"""Part a: runs the CUDA tests, and compares the S-worker with ``transformers.generate`` on the same device."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import torch

from fastdecode import LLM, SamplingParams
from gpu_kit.models import ARCHITECTURES, engine_settings, prompts, tiny_model
from gpu_kit.rows import Part, part_of_arguments

NUM_TOKENS = 24
TESTS_SECONDS = 110


def main() -> None:
    part = part_of_arguments()
    names = list(ARCHITECTURES)[:: 2 if part.quick else 1]
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            part.tried(f"{name}, float32", lambda name=name: compare(part, name, Path(folder) / name))
        part.tried("an R-worker is killed", lambda: compare_with_a_kill(part, Path(folder) / names[0]))
    part.tried("CUDA tests", lambda: run_tests(part))


def compare(part: Part, name: str, folder: Path) -> None:
    """Add the rows of one architecture: float32 with CUDA graphs and with eager code, then bfloat16."""
    model = tiny_model(name)
    model.save_pretrained(folder)
    wanted = generated(model.to(part.device))
    ways: list[dict[str, Any]] = [{"num_mini_batches": 2}, {"num_mini_batches": 1, "enforce_eager": True}]
    for settings in ways:
        found = texts(folder, engine_settings(part.device, dtype="float32", **settings))
        how = "eager" if "enforce_eager" in settings else "CUDA graphs" if part.on_gpu else "two mini-batches"
        part.add(f"{name}, float32, {how}", share(found, wanted), "of tokens are generate's", "must be 1", 1.0)
    if part.quick:
        return
    wanted = generated(model.bfloat16())
    found = texts(folder, engine_settings(part.device, dtype="bfloat16", num_mini_batches=2))
    part.add(f"{name}, bfloat16", share(found, wanted), "of tokens are generate's", "rounding may part texts")


def compare_with_a_kill(part: Part, folder: Path) -> None:
    """Add a row: one of two R-workers is killed, and the texts must stay the same."""
    wanted = texts(folder, engine_settings(part.device, dtype="float32"))
    settings = engine_settings(part.device, dtype="float32", r_workers="spawn:2", r_threads=1)
    found = texts(folder, settings, kill=True)
    part.add(
        "R-workers on the host's cores, one killed", share(found, wanted), "of tokens are the same", "must be 1", 1.0
    )


def generated(model: Any) -> list[list[int]]:
    """Return transformers' greedy tokens after each prompt."""
    outputs = []
    for prompt in prompts():
        ids = torch.tensor([prompt], device=model.device)
        text = model.generate(ids, do_sample=False, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS)
        outputs.append(text[0, len(prompt) :].tolist())
    return outputs


def texts(folder: Path, settings: dict[str, Any], kill: bool = False) -> list[list[int]]:
    """Return the engine's greedy tokens after each prompt."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    tokens: dict[int, list[int]] = {}
    with LLM(str(folder), **settings) as llm:
        engine = llm.llm_engine
        for number, prompt in enumerate(prompts()):
            engine.add_request(str(number), prompt, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
            if kill and sum(map(len, tokens.values())) >= 30:
                kill = False
                os.kill(r_worker_pids()[0], signal.SIGKILL)
    return [tokens[number] for number in sorted(tokens)]


def r_worker_pids() -> list[int]:
    """Return the process ids of this engine's R-workers."""
    children = psutil.Process().children(recursive=True)
    return [each.pid for each in children if "r-worker" in " ".join(each.cmdline())]


def share(found: list[list[int]], wanted: list[list[int]]) -> float:
    """Return the fraction of tokens that equal the wanted ones; 0.0 if the texts do not vary, which proves nothing."""
    if len({token for text in wanted for token in text}) < 10:
        return 0.0
    pairs = [pair for texts_ in zip(found, wanted, strict=True) for pair in zip(*texts_, strict=True)]
    return round(sum(one == other for one, other in pairs) / len(pairs), 4)


def run_tests(part: Part) -> None:
    """Run the project's GPU tests, and add a row with their result."""
    tests = next((each / "tests" for each in Path(__file__).resolve().parents if (each / "tests").is_dir()), Path())
    if not part.on_gpu:
        part.add("CUDA tests", None, note="they need a GPU")
        return
    missing = [name for name in ("pytest", "hypothesis", "xdist") if importlib.util.find_spec(name) is None]
    if missing or not (tests / "test_cuda.py").exists():
        part.add("CUDA tests", None, note=f"no {', '.join(missing) or 'tests/test_cuda.py'} here")
        return
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "test_cuda.py"]
    done = subprocess.run(
        command, cwd=tests, capture_output=True, text=True, check=False, timeout=TESTS_SECONDS,
        env=os.environ | {"PYTHONPATH": str(tests)},
    )  # fmt: skip
    (part.folder / "cuda-tests.txt").write_text((done.stdout + done.stderr)[-200_000:])
    last = next((line for line in reversed(done.stdout.splitlines()) if re.search(r"passed|failed|error", line)), "")
    said = last.strip("= ") or f"exit {done.returncode}"
    part.add("CUDA tests", said, note="cuda-tests.txt", must_be=None if done.returncode == 0 else "passed")


if __name__ == "__main__":
    main()
