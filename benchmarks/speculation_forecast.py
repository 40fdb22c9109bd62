"""What drafts win, live and as ``simulate`` foresees it: python benchmarks/speculation_forecast.py [--only 0,1,2,3]

S-worker and R-worker have a core each. Caches are filled with random keys and values. Text is of two tokens, of which
the first comes with a given probability p: n-grams find drafts everywhere, and p² + (1 - p)² of them are right. Both
runs, without drafts and with what the balance chooses, start with full caches and end with the last token. The
simulator knows of the machine what steps without drafts take (S by rows, R by cached tokens, the host), and of the text
the acceptance that was measured.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from models import llama_folder

from fastdecode import SamplingParams
from fastdecode.config import EngineConfig
from fastdecode.engine import LLMEngine
from fastdecode.metrics import StepRecord
from fastdecode.perfmodel.simulate import SimulatedDrafter, SimulatedRequest, Simulator, SplitMachine
from fastdecode.perfmodel.speculation import LOOKUP_SECONDS, DraftCost, Drafting, row_share
from fastdecode.perfmodel.stages import MeasuredSPart, RPart
from fastdecode.perfmodel.step_model import StepModel
from fastdecode.scheduler import Limits, Scheduler
from fastdecode.scheduler.draft_policy import BalancedDrafts
from fastdecode.scheduler.schedules import SCHEDULES
from fastdecode.step import ScheduledStep
from fastdecode.sworker.random_prompts import RandomPrompts

MOST_DRAFTS = 4
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": MOST_DRAFTS,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 1,
}
LAYERS = 4
VOCABULARY = 4096
FIRST, SECOND = 7, 8
BIAS = 40.0
MINI_BATCHES = 2
ROW_STEPS = (0.5, 1, 2, 3, 5)
"""Rows at which S is timed, as multiples of the sequences."""


@dataclass(frozen=True)
class Case:
    """One configuration; ``repeats``, how often the first token comes, are dealt to the sequences in turn."""

    name: str
    hidden: int
    group: int
    sequences: int
    context_len: int
    repeats: tuple[float, ...]


CASES = (
    Case("R = 5 S, MHA, even text", 512, 1, 64, 2048, (0.9,)),
    Case("R = 2 S, MHA, mixed text", 1024, 1, 48, 2048, (0.99, 0.9, 0.7, 0.5)),
    Case("R = 2 S, groups of 4, mixed text", 512, 4, 64, 3500, (0.99, 0.9, 0.7)),
    Case("S = 5 R, groups of 4, mixed text", 1024, 4, 64, 512, (0.99, 0.9, 0.7)),
)
"""R and S of steps without drafts, about."""


@dataclass
class Tally:
    """What verifications tested and accepted, of each sequence, and how often nothing was found to propose."""

    tested: dict[int, int] = field(default_factory=dict)
    accepted: dict[int, int] = field(default_factory=dict)
    wanted: int = 0
    proposed: int = 0

    def add(self, step: ScheduledStep, accepted: Mapping[int, int]) -> None:
        for each, tokens in step.drafts.items():
            kept = accepted.get(each, 0)
            self.tested[each] = self.tested.get(each, 0) + min(kept + 1, len(tokens))
            self.accepted[each] = self.accepted.get(each, 0) + kept

    @property
    def rate(self) -> float:
        return sum(self.accepted.values()) / max(1, sum(self.tested.values()))

    @property
    def spread(self) -> float:
        """Standard deviation of the sequences' own rates, less what chance makes of equal ones."""
        some = [each for each, count in self.tested.items() if count >= 8]
        if len(some) < 2:
            return 0.0
        rates = np.array([self.accepted[each] / self.tested[each] for each in some])
        chance = np.mean([self.rate * (1 - self.rate) / self.tested[each] for each in some])
        return float(np.sqrt(max(0.0, rates.var() - chance)))

    @property
    def found(self) -> float:
        return self.proposed / max(1, self.wanted)


class Rig:
    """An engine whose runs start with full caches."""

    def __init__(self, case: Case, args: argparse.Namespace) -> None:
        self.case, self.output_len = case, args.output_len
        config = EngineConfig(
            model=llama_folder(case.hidden, LAYERS, VOCABULARY, case.group, heads=16),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            s_cores="0",
            r_cores="1",
            s_threads=1,
            r_threads=1,
            num_mini_batches=MINI_BATCHES,
            schedule="prefill-first",
            enable_prefix_caching=False,
            max_num_seqs=int(max(ROW_STEPS) * case.sequences),
            max_num_batched_tokens=1 << 14,
            kv_cache_memory="6GiB",
            speculative_config=NGRAM,
        )
        self.engine = LLMEngine(config)
        self.limits: Limits = self.engine.scheduler.limits
        self._count = 0

    def run(
        self, sequences: int, context_len: int, output_len: int, drafts: bool, tally: Tally | None = None
    ) -> tuple[float, list[StepRecord]]:
        """Seconds from full caches to the last token, and the decode steps."""
        engine, records = self.engine, []
        limits = self.limits if drafts else replace(self.limits, num_speculative_tokens=0)
        policy = BalancedDrafts(MOST_DRAFTS, MINI_BATCHES) if drafts else None
        scheduler = Scheduler(SCHEDULES["prefill-first"], limits, draft_policy=policy)
        engine.replace_scheduler(scheduler)
        self._listen(scheduler, tally or Tally())
        self._add(sequences, context_len, output_len)
        engine.on_step = records.append
        with engine.computed_by(RandomPrompts):
            while not records or sum(step.num_output_tokens for step in records) < sequences:
                engine.step()
        records.clear()
        engine.clock.restart()
        start = time.perf_counter()
        while engine.has_unfinished_requests():
            engine.step()
        return time.perf_counter() - start, records

    def _listen(self, scheduler: Scheduler, tally: Tally) -> None:
        commit, wanted, propose = scheduler.commit, scheduler.drafts_wanted, scheduler.propose

        def heard_commit(step: ScheduledStep, accepted: Mapping[int, int] = {}) -> None:
            tally.add(step, accepted)
            commit(step, accepted)

        def heard_wanted() -> dict[int, int]:
            found = wanted()
            tally.wanted += len(found)
            return found

        def heard_propose(drafts: Mapping[int, list[int]]) -> None:
            tally.proposed += len(drafts)
            propose(drafts)

        scheduler.commit, scheduler.drafts_wanted = heard_commit, heard_wanted  # type: ignore[method-assign]
        scheduler.propose = heard_propose  # type: ignore[method-assign]

    def _add(self, sequences: int, context_len: int, output_len: int) -> None:
        rng = np.random.default_rng(self._count)
        for index in range(sequences):
            self._count += 1
            often = self.case.repeats[index % len(self.case.repeats)]
            bias = {FIRST: BIAS + math.log(often), SECOND: BIAS + math.log(1 - often)}
            params = SamplingParams(
                max_tokens=output_len, ignore_eos=True, detokenize=False, seed=self._count, logit_bias=bias
            )
            prompt = np.where(rng.random(context_len) < often, FIRST, SECOND).tolist()
            self.engine.add_request(str(self._count), {"prompt_token_ids": prompt}, params)


def machine(rig: Rig, usual: list[StepRecord]) -> SplitMachine:
    """From steps without drafts alone: ``usual``, and some of other numbers of rows over short contexts."""
    count = rig.case.sequences
    found = {}
    for factor in ROW_STEPS:
        rows = int(factor * count)
        steps = rig.run(rows, 16, 12, drafts=False)[1][3:]
        found[rows] = float(np.median([step.s_seconds for step in steps]))
    beside = float(np.median([step.s_seconds for step in usual])) / found[count]
    each = {rows // MINI_BATCHES: beside * found[rows] / (LAYERS * MINI_BATCHES) for rows in found}
    layers = tuple(np.maximum.accumulate(list(each.values())).tolist())
    s_part = MeasuredSPart(tuple(each), layers, (0.0,) * len(each))
    r_seconds = float(np.median([max(step.r_seconds) / step.kv_load for step in usual]))
    model = StepModel(
        LAYERS, s_part, RPart(r_seconds / LAYERS), 1, MINI_BATCHES,
        step_overhead_seconds=float(np.median([step.host_seconds for step in usual])), drains=True,
    )  # fmt: skip
    return SplitMachine(model)


def simulated(rig: Rig, steps: SplitMachine, tally: Tally | None) -> float:
    """Seconds from the first decode step to the last."""
    case = rig.case
    policy, drafter, limits = None, None, replace(rig.limits, num_speculative_tokens=0)
    if tally:
        drafting = Drafting(MOST_DRAFTS, tally.rate, DraftCost(LOOKUP_SECONDS), row_share(case.group))
        drafter = SimulatedDrafter(drafting, 1, tally.spread, found=tally.found)
        policy, limits = BalancedDrafts(MOST_DRAFTS, MINI_BATCHES), rig.limits
    scheduler = Scheduler(SCHEDULES["prefill-first"], limits, draft_policy=policy)
    requests = [SimulatedRequest([0] * case.context_len, rig.output_len) for _ in range(case.sequences)]
    simulator = Simulator(scheduler, steps, drafter=drafter)
    simulator.run(requests)
    return simulator.now_seconds - max(float(request.token_seconds[0]) for request in requests)


def forecast(case: Case, args: argparse.Namespace) -> str:
    """One row of the table."""
    rig = Rig(case, args)
    try:
        rig.run(case.sequences, 64, 24, drafts=True)  # warm
        plain, drafted, tally, usual = [], [], Tally(), []
        for _ in range(args.rounds):
            seconds, usual = rig.run(case.sequences, case.context_len, args.output_len, drafts=False)
            plain.append(seconds)
            seconds, records = rig.run(case.sequences, case.context_len, args.output_len, drafts=True, tally=tally)
            drafted.append(seconds)
        steps = machine(rig, usual)
    finally:
        rig.engine.close()
    pair = [simulated(rig, steps, each) for each in (None, tally)]
    gains = [a / b for a, b in zip(plain, drafted, strict=True)]
    measured, predicted = float(np.median(plain) / np.median(drafted)), pair[0] / pair[1]
    s_ms, r_ms = (1e3 * float(np.median([f(step) for step in usual])) for f in (_s_seconds, _r_seconds))
    rows = sum(step.num_output_tokens for step in records) / sum(step.num_tokens for step in records)
    cells = (
        case.name, f"{case.sequences} x {case.context_len}", f"{s_ms:.1f}, {r_ms:.1f}",
        f"{tally.rate:.2f} +- {tally.spread:.2f}", f"{tally.found:.2f}", f"{rows:.2f}",
        f"{np.median(plain):.2f}, {pair[0]:.2f}", f"{np.median(drafted):.2f}, {pair[1]:.2f}",
        f"{measured:.2f} ({min(gains):.2f} to {max(gains):.2f})", f"{predicted:.2f}",
        f"{predicted / measured - 1:+.1%}",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _s_seconds(step: StepRecord) -> float:
    return step.s_seconds


def _r_seconds(step: StepRecord) -> float:
    return max(step.r_seconds)


def main() -> None:
    """Print a row per configuration."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="0,1,2,3", help="configurations, by number (0,1,2,3)")
    parser.add_argument("--output-len", type=int, default=48, help="tokens of each sequence (48)")
    parser.add_argument("--rounds", type=int, default=3, help="A B A B … (3)")
    args = parser.parse_args()
    print(
        "| text | sequences | S, R ms | acceptance | found | tokens of a row | without, simulated s | with, simulated "
        "| gain | predicted | error |\n|---|---|---|---|---|---|---|---|---|---|---|"
    )
    for index in args.only.split(","):
        print(forecast(CASES[int(index)], args), flush=True)


if __name__ == "__main__":
    main()
