"""Compare the S-worker on a GPU with its limits: python benchmarks/gpu.py

Layers of Llama-7B's shape in bfloat16 with random weights, one token per sequence and step. The R-worker is a stand-in
that answers at once. So the part of a step beyond the S time and the host's work is transfer that nothing has hidden. S
time is measured in turn (A B A B) with bare matrix products over the same weights, both by CUDA events. Steps with CUDA
graphs are measured in turn with eager steps (--enforce-eager).
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from models import decode, llama_folder
from stand_in import StandInBackend

from fastdecode.api.config import EngineConfig
from fastdecode.core.dtypes import WIRE_DTYPE
from fastdecode.engine.engine import LLMEngine

LLAMA_7B = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
}


class AtOnce(StandInBackend):
    """A stand-in R-worker whose answers, zeros, are ready at once.
    The zeros are made once, as a real R-worker's output o is in memory already. Keys and values are not kept, so export
    and import are refused.
    """

    def submit(self, mini_batch: int, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        rows = self._rows.get(mini_batch)
        if rows is None or len(rows) != len(q):
            shape = (len(q), self.layout.layers[layer].num_heads, self.layout.layers[layer].value_head_dim)
            self._rows[mini_batch] = np.full(shape, 0, WIRE_DTYPE[self.layout.model_dtype])

    def begin_step(self, plan: object) -> None:
        """See ``AttentionBackend.begin_step``; the zeros are kept for the next step."""
        kept = getattr(self, "_rows", {})
        super().begin_step(plan)  # type: ignore[arg-type]
        self._rows = kept

    def ready(self, mini_batch: int) -> bool:
        return True

    def collect(self, mini_batch: int) -> np.ndarray:
        return self._rows[mini_batch]


@dataclass(frozen=True)
class Step:
    """Medians over the decode steps of one run, in seconds."""

    wall: float
    s: float
    wait: float
    host: float


def make_engine(
    folder: str, rows: int, num_mini_batches: int, device: str = "cuda", enforce_eager: bool = False
) -> LLMEngine:
    """Return an engine for up to ``rows`` sequences, with weights made on the device."""
    config = EngineConfig(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        device=device,
        max_num_seqs=rows,
        max_num_batched_tokens=max(rows, 2048),
        num_mini_batches=num_mini_batches,
        enforce_eager=enforce_eager,
    )
    return LLMEngine(config, AtOnce())


def step_of(engine: LLMEngine, rows: int, steps: int) -> Step:
    """Decode ``steps`` steps; return medians over all steps but the first and the last."""
    middle = [step for step in decode(engine, rows, steps).steps if step.is_decode][1:-1]
    names = ("wall_seconds", "s_seconds", "wait_seconds", "host_seconds")
    return Step(*(statistics.median(getattr(step, name) for step in middle) for name in names))


def bare_seconds(engine: LLMEngine, rows: int) -> float:
    """Return the seconds of one pass through every linear layer and the head, by CUDA events."""
    linears = [module for module in engine.s_model.model.modules() if isinstance(module, torch.nn.Linear)]
    weight = linears[0].weight
    inputs = {
        width: torch.randn(1, rows, width, dtype=weight.dtype, device=weight.device)
        for width in {linear.in_features for linear in linears}
    }
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.inference_mode():
        start.record()
        for linear in linears:
            linear(inputs[linear.in_features])
        stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3


Kind = tuple[int, bool]
"""The number of mini-batches, and whether CUDA graphs are off."""


def report(engines: dict[Kind, LLMEngine], rows: int, rounds: int, steps: int) -> None:
    """Print S time beside bare products, and steps with CUDA graphs beside eager ones, for ``rows`` sequences."""
    for engine in engines.values():
        step_of(engine, rows, steps)
    one = engines[1, False]
    bare_seconds(one, rows)
    rounds_of = [(step_of(one, rows, steps).s, bare_seconds(one, rows)) for _ in range(rounds)]
    ratios = [s / bare for s, bare in rounds_of]
    print(
        f"{rows} rows: S {statistics.median(s for s, _ in rounds_of) * 1e3:.2f} ms, bare products "
        f"{statistics.median(bare for _, bare in rounds_of) * 1e3:.2f} ms, ratio {statistics.median(ratios):.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f})"
    )
    runs: dict[Kind, list[Step]] = {kind: [] for kind in engines}
    for _ in range(rounds):
        for kind, engine in engines.items():
            runs[kind].append(step_of(engine, rows, steps))
    for (count, eager), found in runs.items():
        wall, s, wait, host = (statistics.median(getattr(run, name) for run in found) for name in Step.__annotations__)
        gains = sorted(a.wall / b.wall for a, b in zip(runs[count, True], found, strict=True))
        gain = f"; eager takes {statistics.median(gains):.2f} x ({gains[0]:.2f} to {gains[-1]:.2f})"
        print(
            f"  {count} mini-batch(es), {'eager' if eager else 'CUDA graphs'}: step {wall * 1e3:.2f} ms = "
            f"S {s * 1e3:.2f} + exposed transfer {wait * 1e3:.2f} + host {host * 1e3:.2f}; "
            f"{rows / wall:,.0f} tokens/s{'' if eager else gain}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rows",
        type=int,
        nargs="+",
        default=[64, 128, 256, 512, 1024],
        help="sequences of a step (64 128 256 512 1024)",
    )
    parser.add_argument("--layers", type=int, default=4, help="number of layers (4)")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds (5)")
    parser.add_argument("--steps", type=int, default=12, help="decode steps per run (12)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            f"benchmarks/gpu.py measures a GPU, and torch {torch.__version__} finds none that it can use: nothing done"
        )
        return
    folder = llama_folder(LLAMA_7B["hidden_size"], args.layers)
    path = Path(folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | LLAMA_7B))
    engines = {
        (count, eager): make_engine(folder, max(args.rows), count, enforce_eager=eager)
        for count in (1, 2)
        for eager in (False, True)
    }
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {args.layers} layers of Llama-7B's, bfloat16")
    for rows in args.rows:
        report(engines, rows, args.rounds, args.steps)


if __name__ == "__main__":
    main()
