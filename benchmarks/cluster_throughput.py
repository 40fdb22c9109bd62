"""Decode tokens per second over each transport beside in-process threads: python benchmarks/cluster_throughput.py

    python benchmarks/cluster_throughput.py --context 1024
    mpirun -n 1 python benchmarks/cluster_throughput.py --transports mpi : \
      -n 1 fastdecode r-worker --transport mpi --cores 1 --threads 1 --kv-cache-memory 4GiB

The S-worker has one thread on the first core and the one R-worker one thread on the last, whatever the transport. An
engine over each transport and one over in-process threads stay open and decode the same sequences in turns, A B A B.
Contexts are filled with random keys and values: to compute the prompts would take minutes and change nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
from models import llama_folder
from transport import listening

import fastdecode.engine
from fastdecode.api.config import EngineConfig
from fastdecode.api.sampling_params import SamplingParams
from fastdecode.core.machine import mend_binding
from fastdecode.core.metrics import StepRecord
from fastdecode.core.step import ScheduledStep
from fastdecode.core.types import ITEM_BYTES
from fastdecode.engine import LLMEngine
from fastdecode.sworker import SModel, SWorker
from fastdecode.sworker.sampling import SampledToken, SamplingRow

SPARE_TOKENS = 256
"""By which contexts may grow."""

SETTLE_SECONDS = 1.2
"""Between turns: an R-worker of MPI naps lightly for a second after its last layer."""


class ContextFiller:
    """Stands in for an engine's S-worker while prompts last: random keys and values, no model, token 1 for all."""

    def __init__(self, s_worker: SWorker) -> None:
        self._s_worker = s_worker
        self._random = np.random.default_rng(0)

    def run(
        self, step: ScheduledStep, sampling: Mapping[int, Sequence[SamplingRow]], overlap: bool = True
    ) -> dict[int, list[SampledToken]]:
        if step.is_decode:
            return self._s_worker.run(step, sampling, overlap)
        for mini_batch, chunks in enumerate(step.mini_batches):
            if chunks:
                attending = int(chunks.chunks["num_rows"][chunks.chunks["attends"]].sum())
                self._append(mini_batch, attending, len(chunks.token_ids))
        return {sequence_id: [SampledToken(1)] * len(rows) for sequence_id, rows in sampling.items()}

    def __getattr__(self, name: str) -> Any:
        """All else is the S-worker's."""
        return getattr(self._s_worker, name)

    def _append(self, mini_batch: int, attending: int, every: int) -> None:
        backend = self._s_worker.backend
        for index, layer in enumerate(self._s_worker.layout.layers):
            keys = self._random.standard_normal((every, layer.num_kv_heads, layer.key_head_dim), np.float32)
            if self._s_worker.layout.model_dtype == "bfloat16":
                keys = (keys.view(np.uint32) >> 16).astype(np.uint16)
            queries = np.zeros((attending, layer.num_heads, layer.key_head_dim), keys.dtype)
            backend.submit(mini_batch, index, queries, keys, keys)
            backend.collect(mini_batch)


def main() -> None:
    """Print every round, and for each transport the median ratio and its range."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transports", default="spawn,tcp", metavar="LIST", help="of spawn, tcp, mpi (spawn,tcp)")
    parser.add_argument("--context", type=int, default=1024, help="tokens cached for each sequence (1024)")
    parser.add_argument("--sequences", type=int, default=64, help="(64)")
    parser.add_argument("--hidden", type=int, default=1024, help="heads of 64, as many for keys as queries (1024)")
    parser.add_argument("--intermediate", type=int, help="(11/4 of hidden)")
    parser.add_argument("--layers", type=int, default=8, help="(8)")
    parser.add_argument("--num-mini-batches", type=int, help="(the engine's choice)")
    parser.add_argument("--steps", type=int, default=8, help="decode steps of a turn (8)")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each (9)")
    args = parser.parse_args()
    if args.steps * (args.rounds + 1) > SPARE_TOKENS // 2:
        parser.error(f"contexts may grow by {SPARE_TOKENS} tokens: fewer steps or rounds")
    mend_binding()
    cores = sorted(os.sched_getaffinity(0))
    settings = settings_for(args, cores[0]) | {"num_mini_batches": args.num_mini_batches}
    model = SModel(EngineConfig(**settings))
    with mock.patch.object(fastdecode.engine, "SModel", lambda config: model):  # one copy of the weights for all
        for transport in args.transports.split(","):
            with (
                config_for("inproc", settings, cores[-1]) as here,
                config_for(transport, settings, cores[-1]) as there,
                engine(here, args) as inproc,
                engine(there, args) as other,
            ):
                compare(transport, inproc, other, args)


def compare(transport: str, inproc: LLMEngine, other: LLMEngine, args: argparse.Namespace) -> None:
    """Print turns of both and the ratios of tokens per second."""
    ratios: list[float] = []
    steps: tuple[list[StepRecord], list[StepRecord]] = ([], [])
    for turn in range(args.rounds + 1):
        rates = []
        for engine, found in zip((inproc, other), steps, strict=True):
            time.sleep(SETTLE_SECONDS)
            records = decode_steps(engine, args.steps)
            rates.append(_tokens_per_second(records))
            found += records if turn else []  # the first is to warm up
        if turn:
            ratios.append(rates[1] / rates[0])
            print(f"inproc {rates[0]:.1f}, {transport} {rates[1]:.1f} tokens/s: {ratios[-1]:.3f}", flush=True)
    for name, found in zip(("inproc", transport), steps, strict=True):
        print(f"{name}: {_describe(found)}")
    middle = statistics.median(ratios)
    print(f"{transport} / inproc at context {args.context}: {middle:.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


def decode_steps(engine: LLMEngine, num_steps: int) -> list[StepRecord]:
    """The records of the next ``num_steps`` steps."""
    steps: list[StepRecord] = []
    engine.on_step = steps.append
    engine.world.clock.restart()
    for _ in range(num_steps):
        engine.step()
    return steps


@contextlib.contextmanager
def config_for(transport: str, settings: dict, core: int) -> Iterator[EngineConfig]:
    """One R-worker on ``core``, over TCP a process that lives as long as this; to be made while all cores are ours."""
    memory = settings["kv_cache_memory"]
    rest = {name: value for name, value in settings.items() if name != "kv_cache_memory"}
    if transport == "tcp":
        with listening(core, "--kv-cache-memory", str(memory)) as address:
            yield EngineConfig(**rest, r_workers=address)
    elif transport == "mpi":
        yield EngineConfig(**rest, r_workers="mpi")
    else:
        spec = {"spawn": "spawn:1"}.get(transport, transport)
        yield EngineConfig(**settings, r_workers=spec, r_threads=1, r_cores=str(core))


@contextlib.contextmanager
def engine(config: EngineConfig, args: argparse.Namespace) -> Iterator[LLMEngine]:
    """An engine with all contexts filled."""
    made = LLMEngine(config)
    try:
        fill_contexts(made, args)
        yield made
    finally:
        made.close()


def fill_contexts(engine: LLMEngine, args: argparse.Namespace) -> None:
    """Start ``args.sequences`` sequences of ``args.context`` cached tokens."""
    engine.world.s_worker = ContextFiller(engine.world.s_worker)  # type: ignore[assignment]
    params = SamplingParams(temperature=0, max_tokens=SPARE_TOKENS, ignore_eos=True, detokenize=False)
    for index in range(args.sequences):
        engine.add_request(str(index), {"prompt_token_ids": [1 + index] * args.context}, params)
    outputs = 0
    while outputs < args.sequences:
        outputs = len(engine.step())


def settings_for(args: argparse.Namespace, s_core: int, dtype: str = "bfloat16") -> dict:
    """Engine settings for a model and cache of these sizes; ``kv_cache_memory`` is what one R-worker needs for all."""
    longest = args.context + SPARE_TOKENS
    blocks = args.sequences * -(-longest // 32)
    return {
        "model": llama_folder(args.hidden, args.layers, group=1, intermediate=args.intermediate),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": dtype,
        "max_model_len": longest,
        "max_num_seqs": args.sequences,
        "max_num_batched_tokens": 8192,
        "schedule": "fcfs",
        "enable_prefix_caching": False,
        "kv_cache_memory": (blocks + 1) * 32 * args.layers * 2 * args.hidden * ITEM_BYTES[dtype],
        "s_threads": 1,
        "s_cores": str(s_core),
    }


def _tokens_per_second(steps: Sequence[StepRecord]) -> float:
    return sum(step.num_output_tokens for step in steps) / sum(step.wall_seconds for step in steps)


def _describe(steps: list[StepRecord]) -> str:
    def median_ms(values: Iterator[float]) -> str:
        return f"{statistics.median(values) * 1e3:.1f}"

    host = median_ms(step.host_seconds for step in steps)
    return (
        f"step {median_ms(step.wall_seconds for step in steps)} ms: S {median_ms(step.s_seconds for step in steps)}, "
        f"waiting {median_ms(step.wait_seconds for step in steps)}, host {host}; "
        f"R {median_ms(step.r_seconds[0] for step in steps)}, "
        f"transfer {median_ms(step.transfer_seconds[0] for step in steps)}"
    )


if __name__ == "__main__":
    main()
