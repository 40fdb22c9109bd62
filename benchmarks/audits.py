"""Measure how soon an audit names an R-worker that is at fault, and what an audit costs.

python benchmarks/audits.py named --fault results    # audited rows until it is named, if 1 of 10,000 rows is wrong
python benchmarks/audits.py named --fault memory     # audited rows until it is named, if 1 bit of a block has flipped
python benchmarks/audits.py cost MODEL               # tokens/s with --audit 0.01, divided by tokens/s without
python benchmarks/audits.py pool                     # CPU time of R-workers with audits and without; needs no model
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import numpy as np

from fastdecode import LLM, SamplingParams
from fastdecode.cluster.pool.audit import Audit
from fastdecode.cluster.pool.auditing import RandomAudit
from fastdecode.cluster.pool.backend import PoolBackend
from fastdecode.cluster.pool.inproc import InprocBackend, InprocWorker
from fastdecode.cluster.r_worker.faults import Faults, FaultyRWorker
from fastdecode.cluster.r_worker.host import RWorkerSize
from fastdecode.core.routes import plan_mini_batch
from fastdecode.core.step import CHUNK, READ
from fastdecode.core.types import CONTROL, StepPlan, WorkerPlan
from fastdecode.kinds import Dense
from fastdecode.kinds.layout import KVLayout
from fastdecode.perfmodel.lab.measure.decode_rig import random_prompts

VICTIM = 1
NUM_SEQS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(required=True)
    named = parts.add_parser("named")
    named.add_argument("--fault", choices=("results", "memory"), required=True)
    named.add_argument("--runs", type=int, default=100)
    named.add_argument("--first", type=int, default=0, help="seed of the first run")
    named.add_argument("--every", type=int, default=10_000, help="rows per wrong one")
    named.add_argument("--kv-replicas", type=int, default=2)
    named.add_argument("--audit", type=float, default=1.0)
    named.set_defaults(run=time_to_name)
    cost = parts.add_parser("cost")
    cost.add_argument("model")
    cost.add_argument("--audit", type=float, default=0.01)
    cost.add_argument("--num-seqs", type=int, default=64)
    cost.add_argument("--context-len", type=int, default=512)
    cost.add_argument("--steps", type=int, default=60, help="steps of each kind")
    cost.add_argument("--r-workers", default="spawn:2")
    cost.add_argument("--kv-replicas", type=int, default=2)
    cost.add_argument("--kv-cache-memory", default="3GiB")
    cost.add_argument("--load-format", default="auto")
    cost.set_defaults(run=time_cost)
    pool = parts.add_parser("pool")
    pool.add_argument("--audit", type=float, default=0.01)
    pool.add_argument("--num-seqs", type=int, default=32)
    pool.add_argument("--context-len", type=int, default=512)
    pool.add_argument("--steps", type=int, default=60, help="steps of each kind")
    pool.add_argument("--kv-replicas", type=int, default=2)
    pool.set_defaults(run=pool_cost)
    args = parser.parse_args()
    args.run(args)


def time_to_name(args: argparse.Namespace) -> None:
    """Print how many audited rows each run takes from the first fault until the R-worker is named."""
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        settings: dict[str, Any] = {"audit": args.audit, "kv_replicas": args.kv_replicas, "r_workers": "inproc:2"}
        settings |= {"max_model_len": 4096, "max_num_seqs": NUM_SEQS, "kv_cache_memory": "256MiB", "block_size": 16}
        found = []
        for seed in range(args.first, args.first + args.runs):
            with LLM(folder, **settings, skip_tokenizer_init=True, seed=seed, r_threads=1) as llm:
                found.append(run_once(llm, seed, args.fault, args.every))
            print(f"seed {seed}: {found[-1][0]:,} audited rows", flush=True)
    counts = [count for count, _ in found]
    expected = args.every if args.fault == "results" else (found[0][1] + 1) / 2
    times = ", ".join(
        f"within {times} x: {sum(count <= times * expected for count in counts)}" for times in (2, 3, 5, 8)
    )
    print(f"{args.fault}, {len(counts)} runs, each named right: expected {expected:,.0f} audited rows; mean "
          f"{np.mean(counts):,.0f}, median {np.median(counts):,.0f}, most {max(counts):,}; {times}")  # fmt: skip


def make_model(folder: Path) -> None:
    """Save a small Llama with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=8192,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def run_once(llm: LLM, seed: int, fault: str, every: int) -> tuple[int, int]:
    """Return how many rows were audited until the R-worker VICTIM was named, and the number of cells.
    If its results are wrong, only rows that VICTIM answered count; else all rows since the bit flipped. A cell is a
    pair of a sequence and a layer. Raise RuntimeError if another R-worker, or none, is named.
    """
    engine, rng = llm.llm_engine, random.Random(seed)
    pool = cast(PoolBackend, engine.backend)
    worker = cast(InprocWorker, pool.workers[VICTIM])
    faulty = FaultyRWorker(worker._open, Faults(every_row=every if fault == "results" else 0, seed=seed), [0])
    worker._worker = cast(Any, faulty)
    params = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True, detokenize=False)
    for number in range(NUM_SEQS):
        prompt = [rng.randrange(128) for _ in range(40)]
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
    for _ in range(rng.randint(4, 40)):
        engine.step()
    counted = Counted(cast(RandomAudit, pool.audit))
    if fault == "memory":
        sequence_id = rng.choice(worker._open.sequence_ids())
        worker._open.flip_bit(sequence_id, rng.randrange(4), rng.randrange(32), rng.randrange(1 << 20))
    while not engine.membership.changes.faulty:
        if not engine.has_unfinished_requests():
            raise RuntimeError(f"seed {seed}: the R-worker was never named")
        engine.step()
    if engine.membership.changes.faulty != (worker.name,) or engine.membership.changes.undecided:
        raise RuntimeError(f"seed {seed}: another R-worker was named: {engine.membership.changes}")
    return counted.of_victim if fault == "results" else counted.num_rows, counted.num_cells


class Counted:
    """Counts the rows that ``audit`` compares from now on, up to the one that names an R-worker."""

    def __init__(self, audit: RandomAudit) -> None:
        self.num_rows = self.of_victim = 0
        self._compare, self._named = audit._compare, False
        self._seen: set[tuple[int, int]] = set()
        audit._compare = self._counting  # type: ignore[method-assign]

    @property
    def num_cells(self) -> int:
        """The number of pairs of a sequence and a layer."""
        return NUM_SEQS * 4

    def _counting(self, row: Any, own: Any, other: Any) -> Any:
        found = self._compare(row, own, other)
        if not self._named:
            self.num_rows += 1
            self.of_victim += row.worker == VICTIM
        self._named |= bool(found)
        return found


def time_cost(args: argparse.Namespace) -> None:
    """Print tokens/s of decode steps with the audit, divided by tokens/s without, in the order A B B A."""
    settings: dict[str, Any] = {"max_num_seqs": args.num_seqs, "kv_replicas": args.kv_replicas}
    settings |= {"max_model_len": args.context_len + 2 * args.steps + 64, "audit": args.audit}
    settings |= {"r_workers": args.r_workers, "kv_cache_memory": args.kv_cache_memory, "load_format": args.load_format}
    with LLM(args.model, **settings, skip_tokenizer_init=True) as llm:
        seconds, num_audited = in_turns(llm, args.num_seqs, args.context_len, args.steps)
    medians = [statistics.median(each) for each in seconds]
    pairs = np.array(seconds[0]) / np.array(seconds[1])
    low, median, high = np.quantile(pairs, (0.25, 0.5, 0.75))
    print(f"step without {medians[0] * 1e3:.2f} ms, with {medians[1] * 1e3:.2f} ms; tokens/s over those without: "
          f"medians {medians[0] / medians[1]:.4f}, means {np.mean(seconds[0]) / np.mean(seconds[1]):.4f}, pairs "
          f"{median:.4f} ({low:.4f} to {high:.4f}); {num_audited} rows audited in {args.steps} steps")  # fmt: skip


def pool_cost(args: argparse.Namespace) -> None:
    """Print the CPU time of two R-workers with the audit, divided by that of two others without.
    All four are in this process; the pairs take turns.
    """
    layers = (Dense(8, 4, 128, 128, 0.1),) * 8
    pools = [InprocBackend([RWorkerSize(512 << 20, 1)] * 2, 32) for _ in range(2)]
    pools[1].set_audit(args.audit, 0)
    for pool in pools:
        pool.open(KVLayout(layers, "bfloat16", "bfloat16"))
    rng = np.random.default_rng(0)
    spent: tuple[list[float], list[float]] = ([], [])
    q, k, v = (rng.integers(0x3E00, 0x3F80, (args.num_seqs, heads, 128)).astype(np.uint16) for heads in (8, 4, 4))
    for step in range(args.context_len + args.steps):
        fills = step < args.context_len
        for kind in (0, 1) if step % 4 < 2 else (1, 0):
            pool, start = pools[kind], time.process_time()
            pool.begin_step(pool_step(args.num_seqs, step, args.kv_replicas, fills))
            for layer in range(len(layers)):
                pool.submit(0, layer, q[: 0 if fills else None], k, v)
                pool.collect(0)
            pool.end_step()
            if not fills:
                spent[kind].append(time.process_time() - start)
    ratio, count = np.sum(spent[1]) / np.sum(spent[0]), pools[1].audit.num_rows
    for pool in pools:
        pool.close()
    low, median, high = np.quantile(np.array(spent[1]) / np.array(spent[0]), (0.25, 0.5, 0.75))
    print(
        f"CPU time of a step {np.mean(spent[0]) * 1e3:.2f} ms; with the audit {ratio:.4f} of that; pairs {median:.4f}, "
        f"{low:.4f} to {high:.4f}; {count} rows audited in {args.steps} steps"
    )


def pool_step(num_seqs: int, context_len: int, copies: int, fills: bool) -> StepPlan:
    """Return a step with one row per sequence; each of two R-workers has half of the sequences.
    ``fills``: the rows are stored but do not attend.
    """
    chunks = np.zeros(num_seqs, CHUNK)
    chunks["sequence_id"] = chunks["cache_id"] = np.arange(num_seqs)
    chunks["worker"] = np.arange(num_seqs) >= num_seqs // 2
    chunks["copy"] = 1 - chunks["worker"] if copies > 1 else -1
    chunks["context_len"], chunks["num_rows"], chunks["attends"] = context_len, 1, not fills
    spans, routes = plan_mini_batch(chunks, np.zeros(0, READ), 2)
    return StepPlan(tuple(WorkerPlan(np.zeros(0, CONTROL), (each,)) for each in spans), (routes,))


def in_turns(llm: LLM, num_seqs: int, context_len: int, num_steps: int) -> tuple[list[list[float]], int]:
    """Return the seconds of decode steps without and with the audit, and how many rows were audited."""
    engine, rng = llm.llm_engine, np.random.default_rng(0)
    pool = cast(PoolBackend, engine.backend)
    params = SamplingParams(temperature=0, max_tokens=2 * num_steps + 40, ignore_eos=True, detokenize=False)
    for number in range(num_seqs):
        prompt = rng.integers(0, engine.s_model.vocab_size, context_len).tolist()
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
    audits = [Audit(), pool.audit]
    pool.audit = audits[0]
    with random_prompts(engine.world):
        while engine.scheduler.snapshot().num_waiting or len(engine.scheduler.snapshot().sequences) < num_seqs:
            engine.step()
        engine.step()
    for _ in range(10):
        engine.step()
    seconds: list[list[float]] = [[], []]
    for step in range(2 * num_steps):
        kind = int(step % 4 in (1, 2))
        pool.audit = audits[kind]
        start = time.perf_counter()
        engine.step()
        seconds[kind].append(time.perf_counter() - start)
    num_audited = engine.membership.changes.audited
    pool.audit = audits[1]
    engine.abort_request(map(str, range(num_seqs)))
    return seconds, num_audited


if __name__ == "__main__":
    main()
