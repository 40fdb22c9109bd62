"""Measure how many audited rows it takes until an R-worker that errs at a known rate is named.

python benchmarks/audit_rates.py results    # one of 10,000 rows of attention is wrong
python benchmarks/audit_rates.py blocks     # one of 10,000 stored blocks has a flipped bit

Each run has two R-workers in this process, without a model. The first one is at fault, and attends all rows. With
``--kv-replicas 2`` the second one stores a copy of each sequence. Faults are independent of each other: the first one
is as likely in one row as in any other. So no audit of all rows can name the R-worker within twice the expected number
in more than 1 - 1 / e^2 of the runs, which is printed as the bound.
"""

from __future__ import annotations

import argparse
import logging
from itertools import count
from typing import Any, cast

import numpy as np

from fastdecode.cluster.pool.auditing import RandomAudit
from fastdecode.cluster.pool.inproc import InprocBackend, InprocWorker
from fastdecode.cluster.r_worker.faults import Faults, FaultyRWorker
from fastdecode.cluster.r_worker.host import RWorkerSize
from fastdecode.core.routes import plan_mini_batch
from fastdecode.core.step import CHUNK, READ
from fastdecode.core.types import CONTROL, StepPlan, StepReport, Verb, WorkerPlan
from fastdecode.kinds import Dense
from fastdecode.kinds.layout import KVLayout

BLOCK_SIZE = 16
LAYER = Dense(4, 2, 16, 16, 0.25)
VICTIM, OTHER = 0, 1


class Run:
    """Steps of two R-workers, of which the first is at fault; all rows are audited.

    ``num_rows``: audited rows up to the one that shows the fault. ``is_over``: whether there was such a row.
    """

    def __init__(self, faults: Faults, copies: int, num_seqs: int, num_layers: int) -> None:
        """``copies``: copies of each sequence, 1 or 2."""
        self._num_seqs, self._num_layers, self._copies = num_seqs, num_layers, copies
        self._pool = InprocBackend([RWorkerSize(64 << 20, 1)] * 2, BLOCK_SIZE)
        self._pool.set_audit(1.0, faults.seed)
        self._pool.open(KVLayout((LAYER,) * num_layers, "float32", "float32"))
        worker = cast(InprocWorker, self._pool.workers[VICTIM])
        worker._worker = cast(Any, FaultyRWorker(worker._open, faults, range(num_layers)))
        self._random = np.random.default_rng(faults.seed)
        self.num_rows, self.is_over = 0, False
        self._audit = cast(RandomAudit, self._pool.audit)
        self._compare = self._audit._compare
        self._audit._compare = self._counting  # type: ignore[method-assign]

    def _counting(self, row: Any, own: Any, other: Any) -> Any:
        found = self._compare(row, own, other)
        self.num_rows += not self.is_over
        self.is_over |= bool(found)
        return found

    def step(self, context_len: int, num_rows: int, attends: bool, renews: bool = False) -> None:
        """Compute ``num_rows`` rows of each sequence. Raise RuntimeError if anybody but the victim is named.

        ``attends``: rows attend, and are audited. ``renews``: release the sequences of earlier steps first.
        """
        k = self._random.standard_normal((self._num_seqs * num_rows, 2, 16), np.float32)
        q = self._random.standard_normal((len(k) if attends else 0, 4, 16), np.float32)
        self._pool.begin_step(self._plan(context_len, num_rows, attends, renews))
        for layer in range(self._num_layers):
            self._pool.submit(0, layer, q, k, k)
            self._pool.collect(0)
        self._check(self._pool.end_step())

    def _plan(self, context_len: int, num_rows: int, attends: bool, renews: bool) -> StepPlan:
        chunks = np.zeros(self._num_seqs, CHUNK)
        chunks["sequence_id"] = chunks["cache_id"] = np.arange(self._num_seqs)
        chunks["worker"], chunks["copy"] = VICTIM, OTHER if self._copies > 1 else -1
        chunks["context_len"], chunks["num_rows"], chunks["attends"] = context_len, num_rows, attends
        spans, routes = plan_mini_batch(chunks, np.zeros(0, READ), 2)
        none = np.zeros(0, CONTROL)
        release = np.array([(Verb.RELEASE, each, 0, 0) for each in range(self._num_seqs * renews)], CONTROL)
        controls = [release, release if self._copies > 1 else none]
        parts = tuple(WorkerPlan(*each) for each in zip(controls, ((one,) for one in spans), strict=True))
        return StepPlan(parts, (routes,))

    def _check(self, report: StepReport) -> None:
        if report.is_doubtful and report.faulty != (VICTIM,):
            raise RuntimeError(f"the audit named {report.faulty}, but R-worker {VICTIM} is at fault")
        if self.is_over and report.faulty != (VICTIM,):
            raise RuntimeError(f"named nobody, and R-worker {VICTIM} is at fault")

    def close(self) -> None:
        self._pool.close()


def wrong_results(seed: int, args: argparse.Namespace) -> int:
    """Return the audited rows until the R-worker is named; one of ``every`` of its results is wrong."""
    run = Run(Faults(every_row=args.every, seed=seed), args.kv_replicas, 32, 2)
    for step in count():
        position = step % 256  # short contexts keep a run cheap
        run.step(position, 1, attends=position > 0, renews=step > 0 and position == 0)
        if run.is_over:
            run.close()
            return run.num_rows
    raise AssertionError("unreachable")


def flipped_blocks(seed: int, args: argparse.Namespace) -> int:
    """Return the audited rows until the R-worker is named; one of ``every`` blocks that it stores has a flipped bit.

    Each audited row reads blocks that no other audited row has read.
    """
    run = Run(Faults(every_block=args.every, seed=seed), args.kv_replicas, 16, 1)
    for step in count():
        run.step(0, args.blocks * BLOCK_SIZE, attends=False, renews=step > 0)
        run.step(args.blocks * BLOCK_SIZE, 1, attends=True)
        if run.is_over:
            run.close()
            return run.num_rows
    raise AssertionError("unreachable")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fault", choices=("results", "blocks"))
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="seed of the first run")
    parser.add_argument("--every", type=int, default=10_000, help="rows, or blocks, per wrong one")
    parser.add_argument("--blocks", type=int, default=64, help="blocks that an audited row reads")
    parser.add_argument("--kv-replicas", type=int, default=2, choices=(1, 2))
    args = parser.parse_args()
    logging.disable()  # each run logs that its R-worker is lost
    measure, chance = wrong_results, 1 / args.every
    if args.fault == "blocks":
        measure, chance = flipped_blocks, 1 - (1 - 1 / args.every) ** args.blocks
    found = np.array([measure(seed, args) for seed in range(args.first, args.first + args.runs)])
    bound = 1 - (1 - chance) ** (2 / chance)
    within = {times: int((found <= times / chance).sum()) for times in (1, 2, 3, 5, 8)}
    print(f"{args.fault}, copies: {args.kv_replicas}; all {args.runs} runs named the R-worker at fault and no other\n"
          f"expected {1 / chance:,.0f} audited rows; mean {found.mean():,.0f}, median {np.median(found):,.0f}, "
          f"most {found.max():,}\nwithin 2 x: {within[2] / args.runs:.0%}; bound {bound:.1%}; "
          f"runs within n x: {within}")  # fmt: skip


if __name__ == "__main__":
    main()
