"""Which sequences decode in a step, and who makes way where blocks run out."""

from __future__ import annotations

import numpy as np

from fastdecode.scheduler.lifecycle import Lifecycle
from fastdecode.scheduler.policy.admission import Admission
from fastdecode.scheduler.policy.attend import Attendance
from fastdecode.scheduler.policy.transfers import Transfers
from fastdecode.scheduler.store.store import Store


class Decodes:
    """All sequences decode in every step, but where a strict load limit would be exceeded or blocks run out."""

    def __init__(
        self, store: Store, admission: Admission, attendance: Attendance, transfers: Transfers, lifecycle: Lifecycle
    ) -> None:
        self._store, self._table, self._workers = store, store.table, store.workers
        self._admission, self._attendance = admission, attendance
        self._transfers, self._lifecycle = transfers, lifecycle

    def rows(self) -> np.ndarray:
        """Rows of the table that decode in this step, with the blocks they need; int64 [n]."""
        table = self._table
        while True:
            table.refresh()
            self._attendance.choose()
            rows = self._within_load_limit()
            tail_lens = table.tail_lens(rows)
            if (tail_lens >= table.segment_tokens).any():
                self._extend(rows[tail_lens >= table.segment_tokens])
                continue
            growing = rows[tail_lens // self._workers.block_size >= table.num_blocks[rows]]
            needed = table.count_held(growing, 1, len(self._workers)).tolist()
            short = [worker for worker, count in enumerate(needed) if not self._store.prefixes.make_room(worker, count)]
            if not short:
                self._store.grow(growing)
                return rows
            self._make_way(short[0])

    def _extend(self, rows: np.ndarray) -> None:
        """The first of these rows of the table, whose tails are whole, gets a new tail, or a victim makes room."""
        sequence = self._table.sequence(int(rows[0]))
        worker, has_room = self._admission.segments.next_tail(sequence)
        if has_room:
            self._store.extend(sequence, worker)
        elif worker >= 0:
            self._make_way(worker)
        else:
            self._lifecycle.preempt(sequence)

    def _make_way(self, worker: int) -> None:
        """R-worker ``worker`` needs blocks: copies that are not needed go first, then a sequence."""
        if not self._transfers.give_up(worker):
            self._lifecycle.preempt(self._lifecycle.victim(worker))

    def _within_load_limit(self) -> np.ndarray:
        """All rows, but for the youngest where expected lengths were exceeded and a strict limit would be."""
        table, limits = self._table, self._admission.load_limit.strict
        rows = table.rows
        if limits is None:
            return rows
        for prompt in self._store.residents.prompts.values():
            for each in prompt.segments if prompt.attends_in_prompt else ():
                limits[each.home] -= min(table.segment_tokens, prompt.num_prefill - each.start)
        for worker in np.flatnonzero(table.kv_loads(len(limits)) > limits):
            loads = table.loads_on(int(worker), rows)
            here, loads = rows[loads > 0], loads[loads > 0]
            by_age = np.argsort(table.chunks["sequence_id"][here])
            beyond = np.cumsum(loads[by_age]) > limits[worker]
            rows = rows[~np.isin(rows, here[by_age[beyond]])]
        return rows
