"""Sequences that outlive their engine.

Another scheduler adopts naive R-workers between any two steps, and each of its steps is recounted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.examples import SEES_ALL
from helpers.scheduler_harness import AMPLE, Job, Run

from fastdecode.core.held import HeldSequence
from fastdecode.core.placing import WHOLE, Placing
from fastdecode.core.types import RWorkerInfo
from fastdecode.engine.compose.outliving import resume_session
from fastdecode.journal.kept_journal import KeptJournal
from fastdecode.journal.past import Past, pasts_of
from fastdecode.journal.places import Folder
from fastdecode.journal.records import Asked, Began, Chain, Placed, Record, Stepped, read

PLACINGS = {"whole": WHOLE, "copies": Placing(copies=2), "ranges": Placing(32), "both": Placing(32, 2)}


def jobs_of(rng: np.random.Generator) -> list[Job]:
    """Return jobs, some of one sample and some of several; half of the prompts begin alike."""
    common = rng.integers(10, 99, 60).tolist()
    jobs = []
    for number in range(6):
        own = rng.integers(10, 99, int(rng.integers(1, 90))).tolist()
        lengths = rng.integers(1, 40, int(rng.choice([1, 1, 3]))).tolist()
        jobs.append(Job((common if number % 2 else []) + own, 40, lengths))
    return jobs


class Journaled:
    """A run, and the records that a journal has of it."""

    def __init__(self, limits: Any, jobs: list[Job], schedule: str = "stall-free") -> None:
        self.run = Run(schedule, limits, jobs)
        self.run.scheduler.store.names.is_wanted = True
        self.records: list[Record] = [
            Asked(100 * number, str(number), None, job.prompt, {"n": len(job.lengths)})
            for number, job in enumerate(jobs)
        ]
        self._written = Counter[int]()

    def one_step(self) -> None:
        self.run.one_step()
        step = Stepped([], [], [])
        for member in (member for group in self.run.members for member in group):
            if new := member.output_token_ids[self._written[member.sequence_id] :]:
                step.tokens.append((member.sequence_id, new))
                self._written[member.sequence_id] += len(new)
                if member.sequence_id not in self.run.alive:
                    step.ended.append((member.sequence_id, "stop", None))
        self.records += [step, Placed(*self.run.scheduler.store.take_notes())]

    @property
    def held(self) -> dict[int, list[HeldSequence]]:
        """The sequences held by each R-worker; shared blocks have the same number.

        The step after the last was not ended, which spoils the states of prompts.
        """
        prompts = {each.tail.cache_id for each in self.run.scheduler.store.residents.prompts.values()}
        found: dict[int, list[HeldSequence]] = {}
        numbers: dict[int, int] = {}
        for (worker, cache_id), each in self.run.naive.held.items():
            blocks = tuple(numbers.setdefault(id(block), len(numbers)) for block in each.blocks)
            least = len(each.tokens) + (cache_id in prompts) if each.state else 0
            found.setdefault(worker, []).append(HeldSequence(cache_id, len(each.tokens), blocks, least))
        return found


def go_on(first: Journaled, second: Journaled, pasts: dict[int, Past], whole_prompts: bool) -> list[int]:
    """Let ``second`` adopt what ``first`` left, and run to the end.

    Return, for each sequence that R-workers know, how many of its tokens are computed again. R-workers learn of a
    prompt's further samples a step later.
    """
    run, again = second.run, []
    known = {name: tokens for past in pasts.values() for name, tokens in past.cached_tokens(whole_prompts).items()}
    held = {each.cache_id for several in first.held.values() for each in several}
    heard = {known[name].sequence_id for name in held & known.keys()}
    run.naive.held = first.run.naive.held
    run.scheduler.store.prefixes.adopt(first.held, known, min((0, *known)))
    begin = run.scheduler.store.begin

    def noting(sequence: Any, segments: Any, hit: Any, second: int = -1) -> None:
        if sequence.outputs_at_start is None and sequence.output_token_ids and sequence.sequence_id in heard:
            again.append(max(0, sequence.num_tokens - 1 - (hit.num_tokens if hit else 0)))
        begin(sequence, segments, hit, second)

    run.scheduler.store.begin = noting  # type: ignore[method-assign]
    run.step_number = 1
    for group, past in zip(run.members, pasts.values(), strict=True):
        for member, sample in zip(group, past.samples, strict=True):
            member.output_token_ids += sample.token_ids
        if any(sample.token_ids for sample in past.samples):
            group[0].siblings = ()
        waiting = [member for member, sample in zip(group, past.samples, strict=True) if not sample.ended]
        run.alive |= {member.sequence_id: member for member in waiting}
        for member in waiting if not group[0].siblings else waiting[:1]:
            run.scheduler.add(member)
    run.to_the_end()
    return again


@pytest.mark.parametrize("name", ["copies", "ranges", "both"])
def test_rows_of_a_first_step_are_not_known_before_it_is_written(name: str, tmp_path: Path) -> None:
    """An R-worker is lost with its engine, and the next engine is killed in its first step.

    That engine may lose another R-worker in this step, so that rows are wrong before it says so. The third engine
    therefore takes nothing that was not there before that step.
    """
    num_cut = 0
    for seed in range(3):
        rng = np.random.default_rng(seed)
        limits = replace(
            AMPLE, block_size=4, num_blocks=(1000,) * 3, bandwidths=(1.0,) * 3, placing=PLACINGS[name],
            max_model_len=200, prefix_caching=True, max_num_batched_tokens=64,
        )  # fmt: skip
        jobs = jobs_of(rng)
        first = Journaled(limits, jobs)
        for _ in range(12):
            first.one_step()
        first.run.naive.lose(seed)
        (folder := tmp_path / str(seed)).mkdir()
        (folder / "journal").write_bytes(Chain().encode([Began("model", "first"), *first.records]))
        journal = KeptJournal(Folder(str(folder)), "model", "second")
        held = first.held
        infos = [RWorkerInfo(str(at), 1000, 4, 1, "scalar", True, held=tuple(held.get(at, ()))) for at in range(3)]
        resume_session(Run("stall-free", limits, jobs).scheduler, infos, journal, keeps=True)
        journal.close()
        for past in pasts_of(read((folder / "journal").read_bytes())[0]).values():
            num_cut += cut_of(past, [each for one in held.values() for each in one])
    assert (num_cut > 0) == (name == "ranges")


def cut_of(past: Past, held: list[HeldSequence]) -> int:
    """Return how many decoding sequences of ``past`` are not wholly held. What is known of each must be in ``held``."""
    known, num_cut = past.cached_tokens(False), 0
    for sequence_id, sample in enumerate(past.samples, past.asked.sequence_id):
        if not sample.token_ids or sample.ended:
            continue
        pieces = [(known[it.cache_id], it.num_tokens) for it in held if it.cache_id in known]
        num_there = 0
        for start in range(0, 200, 32):
            here = [size for piece, size in pieces if (piece.sequence_id, piece.start) == (sequence_id, start)]
            num_there += max(here, default=0) if num_there == start else 0
        assert len(known[sequence_id].token_ids) <= num_there
        num_cut += num_there < len(past.asked.prompt_token_ids + sample.token_ids) - 1
    return num_cut


@pytest.mark.parametrize(
    ("name", "state_blocks"),
    [*((name, 0) for name in PLACINGS), ("whole", 3), ("copies", 3)],
    ids=[*PLACINGS, "states", "copies of states"],
)
@pytest.mark.parametrize("num_blocks", [1000, 60], ids=["room", "tight"])
def test_sequences_resume_where_they_lie(name: str, state_blocks: int, num_blocks: int) -> None:
    """With room for all, no cached token of a decoding sequence is computed again.

    In one run of three an R-worker has come back empty, and then some are.
    """
    placing, num_again, num_begun = PLACINGS[name], 0, 0
    for seed in range(12) if SEES_ALL else (0, 1, 11):
        rng = np.random.default_rng(seed)
        limits = replace(
            AMPLE, block_size=4, num_blocks=(num_blocks,) * 3, bandwidths=(1.0,) * 3, placing=placing,
            max_model_len=200, prefix_caching=True, max_num_batched_tokens=64,
            state_blocks=state_blocks,
        )  # fmt: skip
        jobs = jobs_of(rng)
        first, second = Journaled(limits, jobs), Journaled(limits, jobs)
        for _ in range(int(rng.integers(2, 24))):
            if first.run.alive or not first.run.step_number:
                first.one_step()
        if is_lost := seed % 3 == 2:
            first.run.naive.lose(seed % 2)
        again = go_on(first, second, pasts_of(first.records), placing == WHOLE)
        num_again, num_begun = num_again + sum(again) * (not is_lost), num_begun + len(again)
    assert num_begun > 5 and (num_again == 0 or num_blocks < 1000), num_again
