"""Part b: the S-part's time divided by that of bare matrix products, kernel launches per layer, and a profile."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from fastdecode.api.config import EngineConfig
from fastdecode.perfmodel.lab.measure.decode_rig import DecodeRig, InstantBackend
from gpu_kit.models import shape_folder
from gpu_kit.rows import Part, part_of_arguments

ROWS = (64, 128, 256, 512, 1024, 2048)
ROUNDS, STEPS, CONTEXT = 5, 10, 64


def main() -> None:
    part = part_of_arguments()
    counts = (16, 64) if part.quick else ROWS
    layers = 2 if part.quick else 4
    with tempfile.TemporaryDirectory() as folder:
        model = shape_folder(Path(folder), layers, small=not part.on_gpu)
        for eager in (False, True) if part.on_gpu else (True,):
            part.tried(f"eager {eager}", lambda eager=eager: measure(part, str(model), counts, layers, eager))


def measure(part: Part, folder: str, counts: tuple[int, ...], layers: int, eager: bool) -> None:
    """Add a row for each number in ``counts`` (rows of a step). For eager code, also write a profile."""
    rig = DecodeRig(config_of(part, folder, max(counts), eager), InstantBackend(block_size=32))
    how = "eager" if eager else "CUDA graphs"
    try:
        for rows in counts:
            ratios = [one_round(rig, rows) for _ in range(2 if part.quick else ROUNDS)]
            low, high = min(ratios), max(ratios)
            note = f"{low:.2f} to {high:.2f}; {layers} layers and head" + ("; 1.15 is wanted at 256" * part.on_gpu)
            part.add(f"S-part over products, {rows} rows, {how}", round(statistics.median(ratios), 3), "x", note)
        if eager:
            profile(part, rig, counts[len(counts) // 2], layers)
    finally:
        rig.close()


def config_of(part: Part, folder: str, rows: int, eager: bool) -> EngineConfig:
    """Return the settings of an engine whose attention takes no time."""
    return EngineConfig(
        model=folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", device=part.device,
        max_num_seqs=rows, max_num_batched_tokens=max(rows, 2048), num_mini_batches=1, max_model_len=512,
        enforce_eager=eager, schedule="prefill-first",
    )  # fmt: skip


def one_round(rig: DecodeRig, rows: int) -> float:
    """Return the S time of a step divided by the time of its bare matrix products, measured right after it."""
    steps = rig.decode(rows, CONTEXT, STEPS)
    s_seconds = statistics.median(step.s_seconds for step in steps)
    return s_seconds / products_seconds(rig, rows)


def products_seconds(rig: DecodeRig, rows: int) -> float:
    """Return the seconds of one pass through every linear layer and the head."""
    model = rig.engine.s_model.model
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    first = next(model.parameters())
    widths = {linear.in_features for linear in linears}
    inputs = {width: torch.randn(1, rows, width, dtype=first.dtype, device=first.device) for width in widths}

    def run() -> None:
        for linear in linears:
            linear(inputs[linear.in_features])

    with torch.inference_mode():
        return timed(run, first.device)


def timed(work: Callable[[], object], device: torch.device, repeats: int = 7) -> float:
    """Return the median seconds of ``work``, by the device's own clock."""
    seconds = []
    for _ in range(repeats + 2):
        if device.type == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            stop.record()
            stop.synchronize()
            seconds.append(start.elapsed_time(stop) / 1e3)
        else:
            begun = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - begun)
    return float(np.median(seconds[2:]))


def profile(part: Part, rig: DecodeRig, rows: int, layers: int) -> None:
    """Write one page from torch's profiler over some decode steps, and add a row with the launches per layer."""
    kinds = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if part.on_gpu else [])]
    steps = 4
    with torch.profiler.profile(activities=kinds) as found:
        rig.decode(rows, CONTEXT, steps)
    events = found.key_averages()
    order = "self_device_time_total" if part.on_gpu else "self_cpu_time_total"
    page = events.table(sort_by=order, row_limit=40, max_name_column_width=60)
    (part.folder / "profile.txt").write_text(f"{steps} decode steps and what led to them, {rows} rows\n{page}\n")
    launches = sum(
        each.count for each in events if each.key in ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchKernelExC")
    )
    if part.on_gpu:
        per_layer = launches / (layers * (steps + 3))
        part.add("launches per layer, eager", round(per_layer, 1), "", "profile.txt; head and sampling are in it")
    else:
        part.add("launches per layer", None, note="a CPU launches nothing; profile.txt has its operators")


if __name__ == "__main__":
    main()
