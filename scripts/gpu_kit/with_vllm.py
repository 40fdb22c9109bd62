"""Rows of part d with vLLM: vLLM alone, and FastDecode with vLLM's model code, each in a process with a time limit."""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import torch

from gpu_kit.rows import Part

SECONDS = {False: 60.0, True: 45.0}
"""Limit of each row, by whether the run is quick."""

STEPS, WARM_UP = 8, 3
MOST_PROMPT_TOKENS = 1 << 20
"""Prompt tokens that vLLM computes at most before it decodes: some ten seconds of an H100."""

FIGURE = "figure: "


def add_rows(part: Part, folder: Path, context: int, batch: int) -> None:
    """Add a row for vLLM alone and one for ``--model-impl vllm``: tokens per second, or the reason why not."""
    gc.collect()
    if part.on_gpu:
        torch.cuda.empty_cache()  # the two processes need the GPU's memory
    for way, title in (("alone", "vLLM alone"), ("code", "FastDecode with --model-impl vllm")):
        name = f"{title}, {context} tokens"
        if find_spec("vllm") is None:
            part.add(name, None, note="vLLM is not installed on this host")
        else:
            part.tried(name, lambda way=way, name=name: add_row(part, name, way, folder, context, batch))  # type: ignore[misc]


def add_row(part: Part, name: str, way: str, folder: Path, context: int, batch: int) -> None:
    """Add one row. Raise an error with the reason if its process fails or takes too long."""
    command = [sys.executable, "-m", "gpu_kit.with_vllm", way, str(folder), part.device, str(int(part.quick))]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen([*command, str(context), str(batch)], stdout=said, stderr=subprocess.STDOUT)
        try:
            process.wait(SECONDS[part.quick])
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"stopped after its limit of {SECONDS[part.quick]:.0f} s") from error
        finally:
            end(process)
        said.seek(0)
        lines = said.read().strip().splitlines()
    found = [line.removeprefix(FIGURE) for line in lines if line.startswith(FIGURE)]
    if process.returncode or not found:
        raise RuntimeError(f"exit {process.returncode}: {lines[-1] if lines else 'it printed nothing'}")
    rate, _, note = found[-1].partition(" ")
    part.add(name, float(rate), "tokens/s", note)


def end(process: subprocess.Popen[str]) -> None:
    """End a process and its child processes."""
    try:
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    except psutil.NoSuchProcess:
        family = []
    for each in family:
        try:
            each.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()


def alone(folder: Path, device: str, context: int, batch: int) -> str:
    """Return vLLM's own tokens per second over decode steps, followed by the batch and the number of steps."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}
    from vllm import LLM, SamplingParams

    batch = max(1, min(batch, MOST_PROMPT_TOKENS // context))
    most = context + STEPS + WARM_UP + 2
    own: dict[str, Any] = {"enforce_eager": True} if device == "cpu" else {"gpu_memory_utilization": 0.9}
    engine = LLM(
        model=str(folder), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=most,
        max_num_seqs=batch, enable_prefix_caching=False, max_num_batched_tokens=max(8192, batch), **own,
    ).llm_engine  # fmt: skip
    tokens = STEPS + WARM_UP
    params = SamplingParams(temperature=0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, detokenize=False)
    generator = torch.Generator().manual_seed(0)
    for number in range(batch):
        ids = torch.randint(3, 4000, (context,), generator=generator).tolist()
        engine.add_request(str(number), {"prompt_token_ids": ids}, params)
    steps = seconds_of_decodes(engine, batch)
    return f"{batch / statistics.median(steps):.1f} batch {batch}, median of {len(steps)} decode steps"


def seconds_of_decodes(engine: Any, batch: int) -> list[float]:
    """Return the seconds of the steps that decoded all ``batch`` sequences, without the first WARM_UP steps."""
    made: dict[str, int] = {}
    seconds = []
    while engine.has_unfinished_requests():
        everyone = len(made) == batch
        start = time.perf_counter()
        outputs = engine.step()
        if everyone and len(outputs) == batch:
            seconds.append(time.perf_counter() - start)
        made |= {each.request_id: len(each.outputs[0].token_ids) for each in outputs}
    if len(seconds) <= WARM_UP:
        raise RuntimeError(f"{len(seconds)} steps decoded all {batch} sequences, too few to measure: memory is short")
    return seconds[WARM_UP:]


def main() -> None:
    """Measure what the command line names, and print the figure."""
    way, folder, device, quick, context, batch = sys.argv[1:]
    if way == "alone":
        print(f"\n{FIGURE}{alone(Path(folder), device, int(context), int(batch))}", flush=True)
        return
    from gpu_kit.end_to_end import measure

    part = Part(Path(folder) / "rows.json", device, bool(int(quick)))
    point = measure(part, Path(folder), int(context), int(batch), "vllm")
    busy = f"S busy {point.s_busy:.0%}, R busy {point.r_busy:.0%}"
    print(f"\n{FIGURE}{point.batch / point.wall:.1f} batch {point.batch}; {busy}", flush=True)


if __name__ == "__main__":
    main()
