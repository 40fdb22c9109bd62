"""Runs of the scheduler that mix all features, each drawn from one seed.

Features: ranges, two copies, prefixes, drafts, prefill workers, several completions, aborts and failed steps. R-workers
are lost, join and drain meanwhile.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from fastdecode.core.placing import UNLIMITED, WHOLE, Placing
from fastdecode.scheduler import SCHEDULES, Limits
from helpers.scheduler_harness import Drain, Job, Join, Run

LAST_EVENT = 15
"""The last step at which an event occurs."""


@dataclass
class Mix:
    """A run and its events, as ``Run.to_the_end`` takes them.
    The last of the initial R-workers stays: it can hold any request.
    """

    run: Run
    fail_steps: frozenset[int]
    losses: dict[int, int]
    changes: dict[int, Join | Drain]
    moves_per_step: int

    def to_the_end(self) -> None:
        """Run to the end and check every promise of every step; see ``Run``."""
        self.run.to_the_end(self.fail_steps, self.losses, self.changes, self.moves_per_step)


def draw(seed: int, of_hybrid: bool = False) -> Mix:
    """Return the mix of ``seed``. A mix ``of_hybrid`` has states and is drawn separately."""
    rng = random.Random(seed)
    names = [name for name in SCHEDULES if not SCHEDULES[name].reserves_longest]
    schedule = rng.choice([*names, "sls", "stall-free"])
    block_size = rng.choice([1, 2, 4, 16])
    segment_tokens = rng.choice([UNLIMITED, *(blocks * block_size for blocks in (2, 4, 8, 8))])
    jobs = [_job(rng, segment_tokens) for _ in range(rng.randint(1, 10))]
    limits = _limits(rng, jobs, block_size, segment_tokens)
    if of_hybrid:
        limits = _with_states(rng, limits, max(len(it.lengths) for it in jobs))
    stays = len(limits.num_blocks) - 1
    seconds = tuple(rng.choice([0.1, 0.3]) for _ in limits.num_blocks) if rng.random() < 0.4 else ()
    run = Run(
        schedule,
        limits,
        jobs,
        True,
        seconds,
        drafts_seed=seed,
        prefills_seed=None if of_hybrid else rng.choice([None, None, seed]),
    )
    lost = rng.sample(range(stays), min(stays, rng.choice([0, 1, 1, 2, 3])))
    losses = {rng.randint(0, LAST_EVENT): worker for worker in lost}
    changes = {rng.randint(0, LAST_EVENT): _change(rng, limits) for _ in range(rng.choice([0, 0, 1, 2]))}
    changes = {step: it for step, it in changes.items() if isinstance(it, Join) or it.worker not in lost}
    return Mix(run, frozenset(rng.sample(range(20), rng.choice([0, 0, 1, 2]))), losses, changes, rng.randrange(3))


def _job(rng: random.Random, segment_tokens: int) -> Job:
    """Return a random job. Prompts of two families share beginnings; many end near a range's end."""
    length, family = rng.randint(1, 60), rng.randrange(2)
    if segment_tokens < UNLIMITED and rng.random() < 0.4:
        length = segment_tokens * rng.randint(1, 2) + rng.randint(-1, 1)
    shared = rng.choice([0, rng.randint(0, length), length - 1, length])
    prompt = [1000 * family + i for i in range(shared)]
    prompt += [rng.randrange(5000, 5003) for _ in range(length - shared)]
    most = rng.randint(1, 24)
    lengths = [rng.randint(1, most) for _ in range(rng.choice([1, 1, 1, 2, 3]))]
    return Job(prompt, most, lengths, rng.randint(0, 10), rng.choice([*[None] * 5, rng.randint(0, LAST_EVENT)]))


def _limits(rng: random.Random, jobs: list[Job], block_size: int, segment_tokens: int) -> Limits:
    """Return limits of two to four R-workers; all but the last may be too small for some requests."""
    longest, members = max(len(it.prompt) + it.max_tokens for it in jobs), max(len(it.lengths) for it in jobs)
    need = -(-longest // block_size) + members
    others = [rng.choice([rng.randint(max(1, need // 2), need + 8), need + rng.randint(0, 40)]) for _ in range(3)]
    num_blocks = [*others[: rng.randint(1, 3)], need + rng.randint(0, 30)]
    seats = rng.randint(members, 10)
    return Limits(
        max_num_seqs=seats,
        max_num_batched_tokens=seats + rng.choice([0, 5, 20, 40, 60]),
        num_mini_batches=rng.randint(1, 3),
        scratch_tokens=rng.choice([0, 0, 5, 40, 1000]),
        max_model_len=longest + 1,
        block_size=block_size,
        num_blocks=tuple(num_blocks),
        bandwidths=tuple(rng.choice([1.0, 2.0]) for _ in num_blocks),
        micro_batch_interval=rng.choice([None, 1, 3]),
        prefix_caching=rng.random() < 0.7,
        seconds_per_moved_token=rng.choice([0.0, 0.1]),
        num_speculative_tokens=rng.choice([0, 0, 1, 4]),
        placing=Placing(segment_tokens, rng.choice([1, 2, 2])),
        hosts=(*(rng.choice("ab") for _ in num_blocks[1:]), "c"),
    )


def _with_states(rng: random.Random, limits: Limits, members: int) -> Limits:
    """Return limits of a hybrid, without unsupported features, with room for more states than samples."""
    state_blocks = rng.choice([1, 3])
    more = [state_blocks * (members + rng.choice([0, 1, 12])) for _ in limits.num_blocks]
    return replace(
        limits,
        state_blocks=state_blocks,
        kept_states=random.Random(repr(limits)).choice([UNLIMITED, UNLIMITED, 0, 1, 4]),
        num_blocks=tuple(count + room for count, room in zip(limits.num_blocks, more, strict=True)),
        placing=WHOLE,
        num_speculative_tokens=0,
        scratch_tokens=0,
        prefix_caching=rng.random() < 0.9,
    )


def _change(rng: random.Random, limits: Limits) -> Join | Drain:
    if rng.random() < 0.5:
        return Join(limits.num_blocks[-1] + rng.randint(0, 30), 1.0)
    return Drain(rng.randrange(len(limits.num_blocks) - 1))
