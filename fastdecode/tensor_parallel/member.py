"""Operations of all ranks between layers: each rank acts on its own R-workers, then all compare their results."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, Protocol

import numpy as np

from fastdecode.core import errors
from fastdecode.core.errors import BackendError, FastDecodeError, WorkerLostError
from fastdecode.core.held import HeldSequence
from fastdecode.core.protocols import AttentionBackend
from fastdecode.core.step import MiniBatch, ScheduledStep
from fastdecode.core.types import KvAddress, RWorkerInfo, StepPlan, StepReport
from fastdecode.core.weighing import Queries, WeighedRow
from fastdecode.kinds.layout import KVLayout
from fastdecode.sworker.model.sharding import Rank
from fastdecode.tensor_parallel.held import common, levelling, read_held
from fastdecode.tensor_parallel.rank_messages import Message, combined, mean_weights, read_report, report_message


class Group(AttentionBackend, Protocol):
    """The R-workers of one rank (``PoolBackend``)."""

    join_listener: Any
    workers: list[Any]

    @property
    def num_newcomers(self) -> int:
        """Number of R-workers that have joined this rank's group and are not admitted yet."""

    def admit(self, vacant: Sequence[int] = (), most: int | None = None) -> dict[int, RWorkerInfo]:
        """See ``AttentionBackend.admit``. ``most``: most R-workers to admit now; None for all."""

    def break_off(self) -> None:
        """Close the group, but let its R-workers keep their cached sequences for a later S-worker."""

    def give_up(self, worker: int) -> None:
        """Drop R-worker ``worker`` and its cached sequences, between steps; it may join again."""


class Member:
    """One rank and its group of R-workers. The scheduler's R-worker i is R-worker i of every group.

    Every method is called on all ranks at the same time, and returns the same on all.
    """

    def __init__(self, rank: Rank, pool: Group, in_turn: bool = False) -> None:
        """Store the arguments. With ``in_turn``, rank 0's group opens first, then all others.

        If two jobs want the same R-workers, the job that gets rank 0's also gets those of the other ranks.
        """
        self.rank, self.pool, self._in_turn = rank, pool, in_turn
        self._seconds_ahead = [np.inf] * rank.size
        self._gone: set[int] = set()
        self._exported: np.ndarray | None = None

    def open(self, layout: KVLayout) -> list[RWorkerInfo]:
        """Open each rank's R-workers for the rank's heads; return the logical R-workers, each made of one per rank."""
        ranks = range(self.rank.size)
        turns: list[Sequence[int]] = [ranks[:1], ranks[1:]] if self._in_turn else [ranks]
        groups = [each for turn in turns for each in self._open_groups(turn, layout)]
        counts = [len(group["infos"]) for group in groups]
        if len(set(counts)) > 1:
            raise BackendError(
                f"tensor_parallel_size: ranks have unlike numbers of R-workers ({counts}): give as many to each"
            )
        several = list(zip(*(group["infos"] for group in groups), strict=True))
        return [_logical(infos, held) for infos, held in zip(several, self._level(several), strict=True)]

    def reserve(self, plan: StepPlan) -> None:
        """Send the controls of ``plan`` to the R-workers of all ranks.

        Only rank 0's R-workers continue the step: the other ranks abandon it.
        """

        def begin() -> dict[str, Any]:
            self.pool.begin_step(plan)
            if self.rank.index:
                self.pool.abandon_step()
            return {}

        self.compare(begin)

    def end_step(self) -> StepReport:
        """End the step on all ranks' R-workers; return the ranks' reports combined into one.

        If one rank lost R-worker i, every rank drops its R-worker i. Raise WorkerLostError on all ranks if none is
        left.
        """
        messages = self._exchange(lambda: report_message(self.pool.end_step(), time.perf_counter()), soon=True)
        now = time.perf_counter()
        for rank, message in enumerate(messages):
            self._seconds_ahead[rank] = min(self._seconds_ahead[rank], now - message.told["now"])
        # Clocks of ranks on one machine agree, so a difference below 1 s is only the message's delay
        ahead = [0.0 if abs(each) < 1 else each for each in self._seconds_ahead]
        report = combined([read_report(message, ahead[rank]) for rank, message in enumerate(messages)])
        self._gone.update(report.lost)
        for worker in report.lost:
            self.pool.give_up(worker)
        if len(self._gone) == len(report.workers):
            raise WorkerLostError("every logical R-worker has lost its R-worker of some rank: start R-workers again")
        return report

    def weigh(self, rows: Sequence[WeighedRow], queries: Queries) -> list[np.ndarray | None]:
        """Return each row's attention weight per cache block, averaged over all ranks' heads; None if a rank failed."""

        def weigh() -> Message:
            found = self.pool.weigh(rows, queries)
            return Message("weighed", {}, [np.zeros(0, np.float32) if each is None else each for each in found])

        return mean_weights(self._exchange(weigh))

    def export(self, worker: int, sequence_id: int, start: int, num_tokens: int | None) -> np.ndarray:
        """Return this rank's heads of the cached sequence as bytes; ``import_`` sends them to another R-worker."""

        def take() -> dict[str, Any]:
            self._exported = self.pool.export(worker, sequence_id, start, num_tokens)
            return {}

        self.compare(take)
        return np.zeros(0, np.uint8) if self._exported is None else self._exported

    def import_(self, worker: int, sequence_id: int, num_tokens: int, start: int) -> None:
        """Store the bytes that ``export`` returned last as sequence ``sequence_id`` of R-worker ``worker``."""

        def give() -> dict[str, Any]:
            if self._exported is None:
                raise BackendError("import_ stores what export returned last: call export first")
            self.pool.import_(worker, sequence_id, num_tokens, self._exported, start)
            return {}

        self.compare(give)
        self._exported = None

    def admit(self, vacant: Sequence[int]) -> dict[int, RWorkerInfo]:
        """Admit joined R-workers, the same number in every group; return their descriptions by index."""
        count = min(each["count"] for each in self.compare(lambda: {"count": self.pool.num_newcomers}))
        if not count:
            return {}
        own = {str(index): asdict(info) for index, info in self.pool.admit(vacant, count).items()}
        groups = self.compare(lambda: own)
        self._gone.difference_update(map(int, own))
        return {int(index): _logical([group[index] for group in groups]) for index in own}

    def dismiss(self, worker: int) -> None:
        """Let R-worker ``worker`` leave on all ranks: each rank closes its connection to it."""
        self._gone.add(worker)
        self.pool.dismiss(worker)

    def _open_groups(self, ranks: Sequence[int], layout: KVLayout) -> list[dict[str, Any]]:
        opens = self.rank.index in ranks
        answers = self.compare(lambda: {"infos": list(map(asdict, self.pool.open(layout)))} if opens else {})
        return [answers[rank] for rank in ranks]

    def _level(self, several: Sequence[Sequence[dict[str, Any]]]) -> list[tuple[HeldSequence, ...]]:
        """Return, per logical R-worker, the sequences that all ranks hold; free all others on this rank's R-workers."""
        parts = [read_held(infos) for infos in several]
        held = [common(each, infos[0]["block_size"]) for each, infos in zip(parts, several, strict=True)]
        controls = tuple(levelling(each[self.rank.index], kept) for each, kept in zip(parts, held, strict=True))
        if any(controls):
            self.pool.begin_step(ScheduledStep((MiniBatch.of([]),), controls).to_step_plan())
            self.pool.abandon_step()
        return [tuple(each for each in kept if each.num_tokens) for kept in held]

    def compare(self, do: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the result of ``do`` on each rank. If it fails on any, raise the first error on all."""
        return [each.told for each in self._exchange(lambda: Message("done", do()))]

    def _exchange(self, make: Callable[[], Message], soon: bool = False) -> list[Message]:
        """Call ``make`` on each rank; return all ranks' messages. If it fails on any rank, raise the error on all.

        ``soon``: see ``Rank.all_gather``.
        """
        try:
            answer = make()
        except FastDecodeError as error:
            answer = Message("failed", {"error": type(error).__name__, "text": str(error)})
        answers = [Message.decode(each) for each in self.rank.all_gather(answer.encode(), soon)]
        for rank, each in enumerate(answers):
            if each.kind == "failed":
                text = each.told["text"] if rank == self.rank.index else f"rank {rank}: {each.told['text']}"
                raise getattr(errors, each.told["error"], BackendError)(text)
        return answers


def _logical(partners: Sequence[dict[str, Any]], held: tuple[HeldSequence, ...] = ()) -> RWorkerInfo:
    """Return one description for ``partners``, one R-worker per rank: lowest resources, and all KV ports."""
    infos = [RWorkerInfo(**each) for each in partners]
    afters = [info.park_after for info in infos if info.park_after is not None]
    return replace(
        infos[0],
        num_blocks=min(info.num_blocks for info in infos),
        own_cores=any(info.own_cores for info in infos),
        park_after=max(afters) if len(afters) == len(infos) else None,
        read_gb_per_s=min(info.read_gb_per_s for info in infos),
        held=held,
        kv_ports=tuple(KvAddress(**port) for each in partners for port in each["kv_ports"]),
    )
