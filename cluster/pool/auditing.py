"""Audits a pool's R-workers: some of their rows are computed again elsewhere, and compared bit for bit."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fastdecode.cluster.pool.audit import Ask, Audit, Verdict, Wait
from fastdecode.cluster.pool.audited_rows import AuditedRow, RowChooser
from fastdecode.cluster.pool.referee import Referee
from fastdecode.cluster.pool.routed_rows import RoutedRows
from fastdecode.cluster.pool.worker import Joined
from fastdecode.cluster.r_worker.host import attends_in
from fastdecode.cluster.wire.auditing import MOST_QUESTIONS
from fastdecode.cluster.wire.frames import FRAME_LIMIT
from fastdecode.core.auditing import AuditAnswer, AuditMode, AuditQuestion, answer_bytes
from fastdecode.core.errors import ConfigError, WorkerLostError
from fastdecode.core.routes import is_empty
from fastdecode.core.types import MiniBatchRoutes, RWorkerInfo, StepPlan, best_common_isa
from fastdecode.kinds.layout import KVLayout

logger = logging.getLogger(__name__)


class RandomAudit(Audit):
    """Audits a fraction of all rows, chosen at random.
    If the sequence has a second copy, that copy's R-worker attends the row again. Otherwise this process does so, over
    the keys and values that the row's own R-worker returns. R-workers also check the blocks' checksums.
    """

    is_on = True

    def __init__(self, fraction: float, seed: int) -> None:
        """``fraction``: the fraction of (row, layer) pairs to audit; above 0, up to 1."""
        self._fraction, self._seed = fraction, seed
        self._rows: dict[tuple[int, int], list[AuditedRow]] = {}
        self._answers: dict[int, list[AuditAnswer] | None] = {}
        self._asked: dict[int, list[AuditQuestion]] = {}
        self._waits: list[tuple[int, int, Wait]] = []
        self._num_open = 0
        self._isa = ""

    def open(self, layout: KVLayout, infos: Sequence[RWorkerInfo], ask: Ask) -> None:
        isas = {info.isa: info.name for info in infos}
        if len(isas) > 1:
            raise ConfigError(
                f"audit: R-workers attend in different arithmetic ({', '.join(f'{k} on {v}' for k, v in isas.items())})"
                f", so their results differ: start each with --uniform-arithmetic {best_common_isa(isas)}"
            )
        self._layout, self._ask, self._last = layout, ask, len(layout.layers) - 1
        self._chooser = RowChooser(self._fraction, layout.audited_layers, self._seed)
        if infos:
            self._attend_as(infos[0])
        for index in range(len(infos)):
            ask(index, [])()

    def _attend_as(self, first: RWorkerInfo) -> None:
        """Compute third results in the arithmetic of the ``first`` R-worker. Raise ConfigError if this host cannot."""
        if not attends_in(first.isa):
            raise ConfigError(
                f"audit: R-workers attend in {first.isa}, which this host lacks: start all R-workers with "
                f"--uniform-arithmetic and an instruction set of this host"
            )
        self._isa, self._referee = first.isa, Referee(self._layout, first.isa, first.block_size)

    def admits(self, joined: Joined) -> bool:
        info = joined.info
        if not self._isa:  # no R-worker was present when the pool opened
            try:
                self._attend_as(info)
            except ConfigError as error:
                logger.error("R-worker %s may not join: %s", info.name, error)
                return False
        if info.isa != self._isa:
            logger.error(
                "R-worker %s attends in %s and the others in %s, so it cannot be audited, and may not join: "
                "--uniform-arithmetic makes all use one", info.name, info.isa, self._isa,
            )  # fmt: skip
            return False
        with contextlib.suppress(WorkerLostError):  # the next step notices the loss of the R-worker
            joined.worker.audit([])()
        return True

    def begin(self, plan: StepPlan, routes: Sequence[MiniBatchRoutes]) -> None:
        self.abandon()
        self._num_open = sum(any(not is_empty(each) for each in mini_batch.workers) for mini_batch in routes)
        for row in self._chooser.choose(plan, routes):
            self._rows.setdefault((row.mini_batch, row.question.layer), []).append(row)

    def sent(self, mini_batch: int, layer: int, q: np.ndarray) -> None:
        for row in self._rows.get((mini_batch, layer), ()):
            row.query = q[row.q_row : row.q_row + 1].copy()

    def arrived(self, mini_batch: int, rows: RoutedRows, o: np.ndarray) -> None:
        for row in self._rows.get((mini_batch, rows.layer or 0), ()):
            source = o if row.question.mode is AuditMode.ATTEND else rows.partials_of(row.worker)
            row.given = source[row.out].copy().reshape(-1).view(np.uint8)
        self._num_open -= rows.layer == self._last and bool(rows.busy)
        if self._rows and self._num_open == 0:
            self._send()

    def settle(self) -> None:
        for index, count, wait in self._waits:
            self._receive(index, count, wait)
        self._waits.clear()

    def verdicts(self) -> list[Verdict]:
        if not self._rows:
            return []
        self.settle()
        for index, asked in self._asked.items():
            while self._answers.get(index, []) is not None and (rest := asked[len(self._answers.get(index) or []) :]):
                count = self._most(rest)
                self._receive(index, count, self._ask(index, rest[:count]))
        given = {index: iter(answers) for index, answers in self._answers.items() if answers is not None}
        found = []
        for row in self._all_rows():
            own = next(given[row.worker]) if row.worker in given else None
            other = next(given[row.checker]) if row.checker in given else None
            if own and (other or row.checker < 0):
                found += self._compare(row, own, other)
        self.abandon()
        return found

    def abandon(self) -> None:
        self._rows, self._answers, self._asked, self._waits = {}, {}, {}, []

    def close(self) -> None:
        if self._isa:
            self._referee.close()

    def _all_rows(self) -> list[AuditedRow]:
        return [row for rows in self._rows.values() for row in rows]

    def _send(self) -> None:
        """Send the first questions to each R-worker. Further questions wait until these are answered."""
        for row in self._all_rows():
            is_checked = row.checker >= 0 or self._is_large(row)
            mode = AuditMode.CHECK if is_checked else self._referee.mode(row.question.layer)
            self._asked.setdefault(row.worker, []).append(replace(row.question, mode=mode))
            if row.checker >= 0:
                self._asked.setdefault(row.checker, []).append(replace(row.question, query=row.query))
        for index, asked in self._asked.items():
            count = self._most(asked)
            self._waits.append((index, count, self._ask(index, asked[:count])))

    def _is_large(self, row: AuditedRow) -> bool:
        """Return whether the keys and values of the row's layer do not fit a frame, so only checksums are compared."""
        return answer_bytes(self._layout, replace(row.question, mode=AuditMode.ROWS)) > FRAME_LIMIT

    def _most(self, asked: Sequence[AuditQuestion]) -> int:
        """Return how many of the questions ``asked`` fit one frame and its answer; at least one."""
        ends = np.cumsum([answer_bytes(self._layout, each) for each in asked[:MOST_QUESTIONS]])
        return max(1, int((ends <= FRAME_LIMIT).sum()))

    def _receive(self, index: int, count: int, wait: Wait) -> None:
        answers, before = wait(), self._answers.get(index, [])
        self._answers[index] = None if answers is None or before is None else before + answers

    def _compare(self, row: AuditedRow, own: AuditAnswer, other: AuditAnswer | None) -> list[Verdict]:
        """Return the verdicts on ``row``. ``own``: its R-worker's answer; ``other``: the answer of ``row.checker``."""
        self.num_rows += 1
        for index, answer in ((row.worker, own), (row.checker, other)):
            if answer and answer.is_damaged:
                layer = row.question.layer
                return [Verdict(index, f"its memory has changed: blocks of layer {layer} differ from their checksums")]
        if row.given is None or row.query is None:
            return []
        if other is None:
            if not len(own.found) or np.array_equal(row.given, self._attend_alone(row, own.found)):
                return []
            return self._judge_alone(row, row.given, own.found)
        return [] if np.array_equal(row.given, other.found) else self._judge(row, row.given, other.found)

    def _attend_alone(self, row: AuditedRow, rows: np.ndarray) -> np.ndarray:
        """Return this host's answer for ``row``, over the keys and values that the row's R-worker returned."""
        return self._referee.attend(row, rows, self._referee.mode(row.question.layer))

    def _judge_alone(self, row: AuditedRow, given: np.ndarray, rows: np.ndarray) -> list[Verdict]:
        """Return the verdicts on ``row``, whose answer ``given`` differs from attention over its keys and values."""
        first, second = self._attend_alone(row, rows), self._attend_alone(row, rows)
        if np.array_equal(first, second) and not np.array_equal(first, given):
            layer = row.question.layer
            if self._referee.overflows(row, rows, self._referee.mode(layer)):
                return []
            return [Verdict(row.worker, f"its attention in layer {layer} differs from what its rows give")]
        return [Verdict(-1, "the S-worker's own host got two results for one row: check its memory and processor")]

    def _judge(self, row: AuditedRow, given: np.ndarray, checked: np.ndarray) -> list[Verdict]:
        """Return the verdicts on ``row``: its R-worker answered ``given``, the second copy's R-worker ``checked``."""
        own, other = (self._rows_of(index, row) for index in (row.worker, row.checker))
        if own is None or other is None:
            return []
        layer = row.question.layer
        if not np.array_equal(own, other):
            return [Verdict(-1, f"a sequence's copies differ in layer {layer}, and no checksum tells which is wrong")]
        if self._referee.overflows(row, own):
            return []
        third = self._referee.attend(row, own)
        right = [np.array_equal(third, each) for each in (given, checked)]
        if right[0] == right[1]:
            return [Verdict(-1, f"three computations of one row in layer {layer} differ")]
        wrong = row.checker if right[0] else row.worker
        return [Verdict(wrong, f"its attention in layer {layer} differs from two other computations of the same row")]

    def _rows_of(self, index: int, row: AuditedRow) -> np.ndarray | None:
        """Return keys and values of the row's layer on R-worker ``index``; None if that R-worker is lost."""
        answers = self._ask(index, [replace(row.question, mode=AuditMode.ROWS)])()
        return answers[0].found if answers else None
