"""Part d: decoding with the S-worker on the device and R-workers on the host, compared with the device alone."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from fastdecode.api.config import EngineConfig
from fastdecode.core.machine import available_memory_bytes, usable_cores
from fastdecode.perfmodel.lab.measure.decode_rig import DecodeRig
from gpu_kit import with_vllm
from gpu_kit.models import shape_folder
from gpu_kit.rows import Part, part_of_arguments
from gpu_kit.timeline import draw

CONTEXTS = (32768, 8192, 1024)
"""The context lengths, the longest first, since its figure is wanted most if time runs out."""

STEPS = 8
MOST_BATCH = 512


@dataclass(frozen=True)
class Point:
    """Medians over the decode steps of one batch size."""

    batch: int
    wall: float
    s_busy: float
    r_busy: float
    steps: Any


def main() -> None:
    part = part_of_arguments()
    layers = layers_that_fit(part)
    contexts = (96, 192) if part.quick else CONTEXTS
    with tempfile.TemporaryDirectory() as name:
        folder = shape_folder(Path(name), layers, small=not part.on_gpu)
        part.add("layers", layers, "of Llama-3-8B's 32" if part.on_gpu else "small ones, for a CPU")
        batches_of = {}
        for context in contexts:
            batches_of[context] = part.tried(
                f"{context} tokens", lambda context=context: compare(part, folder, context)
            )
        with_vllm.add_rows(part, folder, contexts[0], batches_of[contexts[0]] or 4)


def layers_that_fit(part: Part) -> int:
    """Return how many layers fit the device, with room left for the cache of the device alone."""
    if not part.on_gpu:
        return 2
    free = torch.cuda.mem_get_info()[0]
    return max(4, min(8, int(free * 0.4 / 0.44e9)))


def compare(part: Part, folder: Path, context: int) -> int:
    """Add rows for one context: FastDecode at balance, the device alone at its largest batch, and the plan's figures.
    Return FastDecode's batch.
    """
    point = at_balance(part, folder, context)
    ours = point.batch / point.wall
    note = f"batch {point.batch}; S busy {point.s_busy:.0%}, R busy {point.r_busy:.0%} (85 % are wanted at balance)"
    part.add(f"FastDecode, {context} tokens", round(ours, 1), "tokens/s", note)
    draw(part.folder / f"timeline-{context}.svg", point.steps)
    alone = part.tried(f"transformers alone, {context} tokens", lambda: alone_at_most(part, folder, context))
    if alone:
        batch, rate = alone
        part.add(f"transformers alone, {context} tokens", round(rate, 1), "tokens/s", f"static cache, batch {batch}")
        part.add(f"FastDecode over it, {context} tokens", round(ours / rate, 2), "x", "2 is wanted at 32768 tokens")
    part.tried(f"plan, {context} tokens", lambda: planned(part, folder, context))
    return point.batch


def at_balance(part: Part, folder: Path, context: int) -> Point:
    """Double the batch until R takes as long as S, or memory is full; return the result for the last batch."""
    found: Point | None = None
    for batch in batches(part, context):
        found = measure(part, folder, context, batch)
        if found.r_busy >= found.s_busy:
            break
    if found is None:
        raise MemoryError("no batch fits the host's memory")
    return found


def batches(part: Part, context: int) -> Iterator[int]:
    """Yield batch sizes, each twice the last, whose keys and values fit the host's memory."""
    batch, most = (4, 8) if part.quick else (16, MOST_BATCH)
    token_bytes = 2 * 2 * 8 * 128 * layers_that_fit(part)
    while batch <= most and (part.quick or batch * context * token_bytes < 0.35 * available_memory_bytes()):
        yield batch
        batch *= 2


def measure(part: Part, folder: Path, context: int, batch: int, model_impl: str = "transformers") -> Point:
    """Return the result for one batch size, with caches of random keys and values."""
    cores = len(usable_cores())
    config = EngineConfig(
        model=str(folder), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", device=part.device,
        max_num_seqs=batch, max_num_batched_tokens=max(2048, batch), num_mini_batches=2, schedule="prefill-first",
        max_model_len=context + 64, enable_prefix_caching=False, s_threads=1 if cores > 1 else None,
        r_threads=max(1, cores - 1), kv_cache_memory="64MiB" if part.quick else "auto", model_impl=model_impl,
    )  # fmt: skip
    rig = DecodeRig(config)
    try:
        steps = rig.decode(batch, context, 4 if part.quick else STEPS)
    finally:
        rig.close()
    walls = [step.wall_seconds for step in steps]
    s_busy = statistics.median(step.s_seconds / step.wall_seconds for step in steps)
    r_busy = statistics.median(max(step.r_seconds) / step.wall_seconds for step in steps)
    return Point(batch, statistics.median(walls), s_busy, r_busy, steps)


def alone_at_most(part: Part, folder: Path, context: int) -> tuple[int, float]:
    """Double the batch until the device's memory is full; return the largest batch and its tokens per second."""
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device(part.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    found = None
    for batch in (2, 4) if part.quick else (4, 8, 16, 32, 64, 128, 256):
        try:
            found = batch, batch / alone_step(model, batch, context, 3 if part.quick else STEPS)
        except torch.OutOfMemoryError:
            break
        finally:
            if part.on_gpu:
                torch.cuda.empty_cache()
    if found is None:
        raise MemoryError("not one batch fits")
    return found


@torch.inference_mode()
def alone_step(model: Any, batch: int, context: int, steps: int) -> float:
    """Return the median seconds of a decode step over a nearly full static cache."""
    cache = transformers.StaticCache(config=model.config, max_cache_len=context + steps + 2)
    seconds = []
    ids = torch.ones(batch, 1, dtype=torch.long, device=model.device)
    for step in range(steps + 2):
        start = time.perf_counter()
        position = torch.full((batch, 1), context + step, device=model.device)
        model(input_ids=ids, position_ids=position, past_key_values=cache, use_cache=True)
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def planned(part: Part, folder: Path, context: int) -> None:
    """Add the figures that `plan --gpu here` predicts for the same model and context."""
    out = part.folder / f"plan-{context}.json"
    command = [sys.executable, "-m", "fastdecode.cli.main", "plan", "--model", str(folder), "--gpu", "here", "--cpu",
               "here", "--prompt-len", str(context - 32), "--seq-len", str(context), "--tpot", "inf",
               "--output-json", str(out)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        note = (done.stderr.strip().splitlines() or ["failed"])[-1]
        part.add(f"plan --gpu here, {context} tokens", None, note=note, must_be="a figure")
        return
    plan = json.loads(out.read_text())
    out.unlink()
    note = f"batch {plan['in_flight']}; beside FastDecode's row above"
    part.add(f"plan --gpu here, {context} tokens", round(plan["output_tokens_per_second"], 1), "tokens/s", note)


if __name__ == "__main__":
    main()
