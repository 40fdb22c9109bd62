"""Parks prefixes on the disks of all ranks' R-workers: a parked prefix (``Chain``) has one file per rank's heads.

A prefix can be loaded only if every rank has its file. A request is finished when it is finished on all ranks, and a
rank that finished early waits for the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fastdecode.core.errors import BackendError, WorkerLostError, interrupts_deferred
from fastdecode.core.parked import Chain, Parked, Parks, Progress
from fastdecode.core.step import MiniBatch, ScheduledStep
from fastdecode.core.types import Verb
from fastdecode.tensor_parallel.member import Member
from fastdecode.tensor_parallel.rank_messages import Message

logger = logging.getLogger(__name__)


class MemberParks:
    """One rank's disks. Every method is called on all ranks at the same time, and returns the same on all."""

    def __init__(self, member: Member, own: Parks) -> None:
        """``own``: the disks of this rank's R-workers."""
        self._member, self._own = member, own
        self._mine: dict[int, tuple[tuple[str, int, bytes], Parked]] = {}

    def chains(self, worker: int, model: str) -> list[Chain]:
        """See ``Parks.chains``. Return the parked prefixes whose files all ranks have."""
        rank = self._member.rank
        part = f"{model}, rank {rank.index} of {rank.size}"
        answers = self._member.compare(lambda: {"chains": [_told(each) for each in self._own.chains(worker, part)]})
        first, *others = [[_chain(told) for told in answer["chains"]] for answer in answers]
        return [chain for chain in first if all(chain in each for each in others)]

    def park(
        self, worker: int, sequence_id: int, chain: Chain, superseded: Sequence[bytes], patience_ms: int
    ) -> Parked:
        asked = "park", sequence_id, chain.name

        def ask(before: Parked) -> Parked:
            return self._own.park(worker, sequence_id, chain, superseded, patience_ms)

        return self._ask(worker, asked, ask)[0]

    def wake(self, worker: int, sequence_id: int, num_blocks: int, name: bytes, patience_ms: int) -> Parked:
        """See ``Parks.wake``. Wait until every rank has loaded some tokens; if one fails, all release theirs."""

        def ask(before: Parked) -> Parked:
            try:
                answer = self._own.wake(worker, sequence_id, num_blocks, name, patience_ms)
                while answer.progress is Progress.UNDER_WAY and not answer.num_tokens:
                    answer = self._own.wake(worker, sequence_id, num_blocks, name, patience_ms)
            except WorkerLostError:
                raise
            except BackendError as error:
                logger.warning("%s", error)
                return Parked(Progress.FAILED, before.num_tokens)
            return answer

        answer, mine = self._ask(worker, ("wake", sequence_id, name), ask)
        if answer.progress is not Progress.FAILED:
            return answer
        if mine.num_tokens:
            self._release(worker, sequence_id)
        return answer._replace(num_tokens=0)

    def _ask(
        self, worker: int, asked: tuple[str, int, bytes], ask: Callable[[Parked], Parked]
    ) -> tuple[Parked, Parked]:
        """Return (the combined answer of all ranks to a request, this rank's own answer).

        ``asked`` identifies the request: "park" or "wake", the sequence's id, the parked prefix's name. ``ask`` repeats
        it to this rank's R-worker, given its previous answer, unless the R-worker has finished.
        """
        known = self._mine.pop(worker, None)
        mine = known[1] if known and known[0] == asked else Parked(Progress.UNDER_WAY)

        def told() -> dict[str, Any]:
            nonlocal mine
            if mine.progress is Progress.UNDER_WAY:
                mine = ask(mine)
            return _Answer.of(mine).told()

        together = _combined([_Answer(**each).parked() for each in self._member.compare(told)])
        if together.progress is Progress.UNDER_WAY:
            self._mine[worker] = asked, mine
        return together, mine

    def _release(self, worker: int, sequence_id: int) -> None:
        """Release the tokens that this rank's R-worker ``worker`` has loaded, since another rank's load failed."""
        release = ((int(Verb.RELEASE), sequence_id, 0, 0),)
        num_workers = len(self._member.pool.workers)
        controls = tuple(release if index == worker else () for index in range(num_workers))
        self._member.pool.begin_step(ScheduledStep((MiniBatch.of([]),), controls).to_step_plan())
        self._member.pool.abandon_step()


class Tells(Protocol):
    """An object that sends messages to all other ranks and detects lost ranks, such as ``TensorParallelBackend``."""

    def ask_all(self, message: Message, do: Callable[[], Any]) -> Any:
        """Send ``message`` to the other ranks, which then act as ``do`` does here; return the result of ``do``."""


class RankParks:
    """Implements ``Parks`` over the disks of all ranks: rank 0 tells the others what to do with theirs."""

    def __init__(self, backend: Tells, parks: MemberParks) -> None:
        self._backend, self._parks = backend, parks

    def chains(self, worker: int, model: str) -> list[Chain]:
        found: list[Chain] = self._do("chains", worker=worker, model=model)
        return found

    def park(
        self, worker: int, sequence_id: int, chain: Chain, superseded: Sequence[bytes] = (), patience_ms: int = 2
    ) -> Parked:
        names = [name.hex() for name in superseded]
        told = {"worker": worker, "sequence_id": sequence_id, "chain": _told(chain), "superseded": names}
        answer: Parked = self._do("park", **told, patience_ms=patience_ms)
        return answer

    def wake(self, worker: int, sequence_id: int, num_blocks: int, name: bytes, patience_ms: int = 2) -> Parked:
        told = {"worker": worker, "sequence_id": sequence_id, "num_blocks": num_blocks, "name": name.hex()}
        answer: Parked = self._do("wake", **told, patience_ms=patience_ms)
        return answer

    def _do(self, what: str, **told: Any) -> Any:
        with interrupts_deferred():
            return self._backend.ask_all(Message(what, told), lambda: carry_out(self._parks, what, told))


def carry_out(parks: MemberParks, what: str, told: dict[str, Any]) -> Any:
    """Call the method ``what`` of ``parks`` ("chains", "park" or "wake") with the arguments ``told`` from a message."""
    if what == "chains":
        return parks.chains(**told)
    if what == "wake":
        return parks.wake(**{**told, "name": bytes.fromhex(told["name"])})
    superseded = [bytes.fromhex(name) for name in told["superseded"]]
    return parks.park(**{**told, "chain": _chain(told["chain"]), "superseded": superseded})


@dataclass(frozen=True)
class _Answer:
    """The fields of a ``Parked`` with JSON's types, for messages between ranks."""

    progress: int
    num_tokens: int
    num_bytes: int
    dropped: list[str]

    @staticmethod
    def of(parked: Parked) -> _Answer:
        return _Answer(
            int(parked.progress), parked.num_tokens, parked.num_bytes, [each.hex() for each in parked.dropped]
        )

    def told(self) -> dict[str, Any]:
        return dict(vars(self))

    def parked(self) -> Parked:
        dropped = tuple(bytes.fromhex(each) for each in self.dropped)
        return Parked(Progress(self.progress), self.num_tokens, self.num_bytes, dropped)


def _combined(answers: Sequence[Parked]) -> Parked:
    """Return the ranks' answers as one. A parked prefix that one rank dropped is of no use to any rank."""
    found = {each.progress for each in answers}
    progress = next((each for each in (Progress.FAILED, Progress.UNDER_WAY) if each in found), Progress.DONE)
    dropped = dict.fromkeys(name for each in answers for name in each.dropped)
    num_bytes = sum(each.num_bytes for each in answers)
    return Parked(progress, min(each.num_tokens for each in answers), num_bytes, tuple(dropped))


def _told(chain: Chain) -> dict[str, Any]:
    return {"num_blocks": chain.num_blocks, "marks": [mark.hex() for mark in chain.marks], "rest": chain.rest}


def _chain(told: dict[str, Any]) -> Chain:
    return Chain(told["num_blocks"], tuple(bytes.fromhex(mark) for mark in told["marks"]), told["rest"])
